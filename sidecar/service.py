"""Make the environment that runs this the system's sidecar, and undo that.

The unit names the environment by its path, so an upgrade is: make another environment, `install` from there. To go
back is to `install` from the one before. Whatever is there already as it should be is left alone, and nothing here
touches a trainer: not its process, its socket directory nor its unit while it runs.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sidecar.config import SYSTEM_STATE_DIR
from sidecar.whole_file import replace_whole

SERVICE = "dflash-sidecar.service"
SHIPPED_ENVIRONMENT = "/opt/dflash/venv"
"""What the shipped unit says where the path of the environment belongs."""
CONFIG = Path("etc/dflash/sidecar.toml")
COMMAND = Path("usr/local/bin/dflash-sidecar")
_SYSUSERS = Path("etc/sysusers.d/dflash.conf")
_TMPFILES = Path("etc/tmpfiles.d/dflash.conf")
_UNIT = Path("etc/systemd/system") / SERVICE
_TRAINER_FILES = {
    "dflash-trainer@.service": Path("etc/systemd/system/dflash-trainer@.service"),
    "dflash-trainer.slice": Path("etc/systemd/system/dflash-trainer.slice"),
}
_FILES = {"sysusers.d/dflash.conf": _SYSUSERS, "tmpfiles.d/dflash.conf": _TMPFILES, SERVICE: _UNIT, **_TRAINER_FILES}
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - where an environment must not be
"""What ProtectHome= and PrivateTmp= of the unit take away."""
_S_IXOTH = 0o001


class ServiceError(ValueError):
    """The service cannot be installed or removed; the message is meant for the user."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where to install, and how.

    `root` is / or the root directory of an image; `only_say` changes nothing.
    """

    root: Path
    only_say: bool
    say: Callable[[str], None]

    @property
    def is_live(self) -> bool:
        """Whether it is the system that runs, whose service manager is to be told."""
        return self.root == Path("/")

    def path(self, relative: Path) -> Path:
        """A path below the root."""
        return self.root / relative

    def write(self, relative: Path, content: str) -> bool:
        """Replace a file as a whole unless it is so already; returns whether it was another."""
        path = self.path(relative)
        if path.is_file() and path.read_text() == content:
            self.say(f"unchanged  {path}")
            return False
        self.say(f"{'would write' if self.only_say else 'write':10} {path}")
        if not self.only_say:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            replace_whole(path, content.encode(), f".{path.name}.", lambda fd: os.fchmod(fd, 0o644))
        return True

    def link(self, relative: Path, program: Path) -> None:
        """Point a symbolic link at a program; a file that is no link is somebody else's."""
        path = self.path(relative)
        if path.is_symlink() and path.readlink() == program:
            self.say(f"unchanged  {path}")
        elif path.exists() and not path.is_symlink():
            self.say(f"leave      {path}, which is no link of ours; the command is {program}")
        else:
            self.say(f"{'would link' if self.only_say else 'link':10} {path} -> {program}")
            if not self.only_say:
                path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                path.symlink_to(program)

    def remove(self, relative: Path) -> None:
        """Remove a file or link if it is there."""
        path = self.path(relative)
        if path.exists() or path.is_symlink():
            self.say(f"{'would remove' if self.only_say else 'remove':10} {path}")
            if not self.only_say:
                path.unlink()

    def run(self, *command: str) -> None:
        """Run a program of systemd; raises ServiceError when it fails."""
        self.say(f"{'would run' if self.only_say else 'run':10} {' '.join(command)}")
        if not self.only_say:
            done = _output(command)
            if done.returncode:
                words = (done.stderr or done.stdout).strip()
                raise ServiceError(f"{' '.join(command)} failed: {words}")


def install(target: Target) -> None:
    """Install, enable and start; raises ServiceError."""
    environment = Path(sys.prefix)
    _check(target, environment)
    try:
        changed = [target.write(to, _shipped(name, environment)) for name, to in _FILES.items()]
        if target.path(CONFIG).exists():
            target.say(f"keep       {target.path(CONFIG)}")
        else:
            target.write(CONFIG, _shipped("sidecar.toml", environment))
        target.link(COMMAND, environment / "bin/dflash-sidecar")
    except OSError as error:
        raise ServiceError(f"{error.filename}: {error.strerror}; install as root") from error
    root = () if target.is_live else (f"--root={target.root}",)
    target.run("systemd-sysusers", *root, str(target.path(_SYSUSERS)))
    target.run("systemd-tmpfiles", *root, "--create", str(target.path(_TMPFILES)))
    target.run("systemctl", *root, "enable", "--quiet", SERVICE)
    if target.is_live:
        target.run("systemctl", "daemon-reload")
        _bring_up(target, is_new=any(changed))


def uninstall(target: Target) -> None:
    """Stop and remove the service; what it recorded and what belongs to trainers stays. Raises ServiceError."""
    _check_root(target)
    shipped_config = _shipped("sidecar.toml", Path(sys.prefix))
    root = () if target.is_live else (f"--root={target.root}",)
    if target.path(_UNIT).exists():
        target.run("systemctl", *root, "disable", "--quiet", *(("--now",) if target.is_live else ()), SERVICE)
    runs = _runs() if target.is_live else []
    try:
        for relative in [*_FILES.values(), COMMAND]:
            if runs and relative in _TRAINER_FILES.values():
                target.say(f"leave      {target.path(relative)}: {', '.join(runs)} is running")
            elif relative != COMMAND or target.path(relative).is_symlink():
                target.remove(relative)
        config = target.path(CONFIG)
        if config.exists() and config.read_text() == shipped_config:
            target.remove(CONFIG)
    except OSError as error:
        raise ServiceError(f"{error.filename}: {error.strerror}; uninstall as root") from error
    if target.is_live:
        target.run("systemctl", "daemon-reload")
    stays = [str(target.path(path)) for path in (SYSTEM_STATE_DIR.relative_to("/"), CONFIG, Path("run/dflash"))]
    stays.append(sys.prefix)
    target.say(f"left alone: {', '.join(path for path in stays if Path(path).exists())}, and the users")


def _bring_up(target: Target, *, is_new: bool) -> None:
    """Start it, or restart it when its unit is another; it is ready when this returns."""
    try:
        target.run("systemctl", "restart" if is_new else "start", SERVICE)
    except ServiceError as error:
        log = _output(("journalctl", "--unit", SERVICE, "--lines=10", "--output=cat")).stdout.strip()
        raise ServiceError(f"{error}\n{log}") from error


def _shipped(name: str, environment: Path) -> str:
    """A shipped file for this environment: out of the wheel, or out of the checkout it is installed from."""
    packaged = Path(__file__).with_name("units")
    directory = packaged if packaged.is_dir() else Path(__file__).parent.parent / "systemd"
    return (directory / name).read_text().replace(SHIPPED_ENVIRONMENT, str(environment))


def _check(target: Target, environment: Path) -> None:
    _check_root(target)
    if not (environment / "bin/dflash-sidecar").exists():
        raise ServiceError(f"{environment} has no bin/dflash-sidecar; install from the environment that is to run it")
    for what, path in (("this environment", environment), ("its Python", Path(sys.executable).resolve())):
        closed = next((part for part in (path, *path.parents) if not part.stat().st_mode & _S_IXOTH), None)
        if any(path.is_relative_to(hidden) for hidden in _HIDDEN) or closed is not None:
            raise ServiceError(
                f"{what}, {path}, is out of the service's reach ({closed or 'homes and /tmp are hidden from it'}); "
                "make one elsewhere with the system's Python: /usr/bin/python3 -m venv /opt/dflash/venv"
            )


def _check_root(target: Target) -> None:
    if not target.only_say and os.geteuid() != 0:
        raise ServiceError("only root can do this; --dry-run shows what would be done")


def _runs() -> list[str]:
    """Training runs that the service manager started and that live."""
    pattern = ("systemctl", "list-units", "--no-legend", "--plain", "--state=active", "dflash-trainer@*.service")
    return [line.split()[0] for line in _output(pattern).stdout.splitlines()]


def _output(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - literal names
    except FileNotFoundError as error:
        raise ServiceError(f"{command[0]} is not there: this needs a machine with systemd") from error
