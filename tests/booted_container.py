"""A container with a real systemd as its first process: this machine's own root under an overlay, booted by nspawn.

$SYSTEMD_TEST_ROOT names another root directory to boot, of a distribution with another systemd.
Nothing reaches the machine but loopback, which is shared, so a page served inside is read from outside. What is not
possible for want of rights or programs is `Impossible`, and its text says what is missing.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHECKOUT = "/opt/checkout"
"""Where the container sees this repository, read-only."""
BOOT_TIMEOUT_S = 30.0
_CGROUPS = Path("/sys/fs/cgroup")
_PASSED_ON = ("PIP_", "UV_", "SSL_", "HTTP_", "HTTPS_", "NO_PROXY", "http_", "https_", "no_proxy", "REQUESTS_")


class Impossible(Exception):  # noqa: N818 - it is no error of the code under test
    """No container can be booted here; the message says why."""


class BootedContainer:
    """One container. `boot` it, `run` commands in it, `shut_down` and boot it again, `close` it.

    Raises:
        Impossible: not root, a program is missing, or the kernel refuses.
    """

    def __init__(self) -> None:
        for program in ("systemd-nspawn", "nsenter"):
            if shutil.which(program) is None:
                raise Impossible(f"{program} is not installed (Debian: systemd-container, util-linux)")
        if os.geteuid() != 0:
            raise Impossible("only root can boot a container")
        # In memory where there is room: an overlay may not lie on an overlay.
        shared_memory = Path("/dev/shm")
        self._place = Path(tempfile.mkdtemp(prefix="dflash-", dir=shared_memory if shared_memory.is_dir() else None))
        self._place.chmod(0o755)
        self.root = self._place / "root"
        self._leader = 0
        self._process: subprocess.Popen[bytes] | None = None
        hierarchies = [_CGROUPS / name for name in ("systemd", "unified") if (_CGROUPS / name).is_dir()]
        self._cgroups = [path / f"dflash-{os.getpid()}" for path in hierarchies or [_CGROUPS]]
        for name in ("root", "upper", "work"):
            (self._place / name).mkdir()
            (self._place / name).chmod(0o755)
        lower = os.environ.get("SYSTEMD_TEST_ROOT", "/")
        options = f"lowerdir={lower},upperdir={self._place}/upper,workdir={self._place}/work"
        mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(self.root)]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(self._place)
            raise Impossible(f"an overlay cannot be mounted here: {done.stderr.strip()}")
        (self.root / "etc/machine-id").write_text("")

    def boot(self, unit: str = "basic.target") -> None:
        """Start it and wait until systemd has reached a unit."""
        for cgroup in self._cgroups:
            cgroup.mkdir(exist_ok=True)
        enter = "".join(f"echo $$ >{cgroup}/cgroup.procs; " for cgroup in self._cgroups)
        nspawn = (
            f"exec systemd-nspawn --quiet --boot --register=no --keep-unit --directory={self.root} "
            f"--machine=dflash-{os.getpid()} --capability=all --system-call-filter='bpf perf_event_open' "
            f"--console=pipe --bind-ro={ROOT}:{CHECKOUT} -- --unit={unit}"
        )
        log = self._place / "boot.log"
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", enter + nspawn],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=os.environ | {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )
        deadline_s = time.monotonic() + BOOT_TIMEOUT_S
        while not self._is_up():
            has_failed = self._process.poll() is not None or time.monotonic() > deadline_s
            assert not has_failed, log.read_text(errors="replace")[-2000:]
            time.sleep(0.05)

    def run(self, *command: str, timeout_s: float = 60.0) -> str:
        """Run a command to its end and return what it printed; raises AssertionError when it fails."""
        done = self.attempt(*command, timeout_s=timeout_s)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def attempt(self, *command: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end, whatever that is."""
        return subprocess.run(
            self._entering(command), capture_output=True, text=True, timeout=timeout_s, check=False, env=_environ()
        )

    def write(self, path: str, content: str) -> None:
        """Write a file in the container."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)

    def shut_down(self) -> None:
        """Power it off; its files stay."""
        if self._process is None:
            return
        if self._leader:
            os.kill(self._leader, signal.SIGRTMIN + 4)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process, self._leader = None, 0

    def close(self) -> None:
        """Power it off and remove everything that was made for it."""
        self.shut_down()
        subprocess.run(["umount", str(self.root)], check=True)
        shutil.rmtree(self._place)
        for cgroup in self._cgroups:
            for path, _, _ in os.walk(cgroup, topdown=False):
                with contextlib.suppress(OSError):  # the kernel still empties it
                    Path(path).rmdir()

    def _is_up(self) -> bool:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        if not children:
            return False
        self._leader = int(children[0])
        done = self.attempt("systemctl", "is-system-running")
        return done.stdout.strip() in {"running", "degraded"}

    def _entering(self, command: Sequence[str]) -> list[str]:
        namespaces = ["-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w"]
        return ["nsenter", "--target", str(self._leader), *namespaces, "--", *command]


def _environ() -> dict[str, str]:
    """A bare root's environment, and what says where packages come from."""
    passed_on = {key: value for key, value in os.environ.items() if key.startswith(_PASSED_ON)}
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"} | passed_on
