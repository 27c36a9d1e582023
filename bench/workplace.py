"""Where a benchmark's processes live: directories of their own, and everything ended at the end.

Nothing of the user's own setup is touched: the sidecars here have their own state directory, runtime directory and
port, and W&B means a stand-in server on this machine.
"""

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import msgspec
import psutil

from sidecar.state_dir import owner_of

ROOT = Path(__file__).parent.parent
POLL_S = 0.01
START_TIMEOUT_S = 60.0


class BenchmarkError(RuntimeError):
    """A process did not do what the measurement needs."""


class WandbServer(NamedTuple):
    """A stand-in W&B server: its process and the environment that leads to it."""

    pid: int
    environ: Mapping[str, str]


class SidecarProcess(NamedTuple):
    """A running sidecar."""

    process: "subprocess.Popen[bytes]"
    url: str

    def status(self) -> dict[str, Any]:
        """The status document."""
        document: dict[str, Any] = msgspec.json.decode(fetch(self.url, "/api/v1/status"))
        return document


class Workplace:
    """A temporary place for processes; as a context it ends all of them and removes the place."""

    def __init__(self) -> None:
        # Not under the repository: a socket's path has to be short.
        self.path = Path(tempfile.mkdtemp(prefix="dflash-bench-"))
        self.runtime_dir = self.path / "run"
        self.runtime_dir.mkdir(mode=0o700)
        self._started: list[subprocess.Popen[bytes]] = []
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DFLASH_", "WANDB_"))}
        self.environ = kept | {
            "DFLASH_RUNTIME_DIR": str(self.runtime_dir),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_SILENT": "true",
            "WANDB_DIR": str(self.path),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._started):
            self.end(process)
        shutil.rmtree(self.path, ignore_errors=True)

    def popen(
        self, arguments: Sequence[str], environ: Mapping[str, str] | None = None, python: str | Path = sys.executable
    ) -> "subprocess.Popen[bytes]":
        """Start a Python process; what it writes goes to a log that `complain` quotes."""
        log = self._log(arguments)
        with log.open("wb") as stream:
            process = subprocess.Popen(  # noqa: S603 - our own modules
                [str(python), *arguments],
                env=self.environ | dict(environ or {}),
                cwd=self.path,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def output(self, process: "subprocess.Popen[bytes]") -> str:
        """Everything a process has written so far."""
        assert isinstance(process.args, list)
        return self._log(process.args[1:]).read_text(errors="replace")

    def sidecar(self, options: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> SidecarProcess:
        """Start a sidecar on an empty state directory and wait until it answers."""
        state_dir = Path(tempfile.mkdtemp(prefix="state-", dir=self.path))
        defaults = ("--state-dir", str(state_dir), "--listen", "127.0.0.1:0")
        process = self.popen(("-m", "sidecar", "run", *defaults, *options), environ)

        def answers() -> bool:
            owner = owner_of(state_dir)
            try:
                return owner is not None and bool(owner.url) and bool(fetch(owner.url, "/-/ready"))
            except OSError:
                return False

        self.wait(answers, process, "the sidecar to answer")
        owner = owner_of(state_dir)
        assert owner is not None
        return SidecarProcess(process, owner.url)

    def wandb_server(self, *, hung: bool = False) -> WandbServer:
        """Start a stand-in W&B server, or one that takes connections and never answers."""
        process = self.popen(("-m", "bench.wandb_server", "hung" if hung else "answering"))
        self.wait(lambda: "WANDB_BASE_URL=" in self.output(process), process, "the stand-in W&B server")
        return WandbServer(process.pid, dict(pair.split("=", 1) for pair in self.output(process).split()))

    def wait(
        self,
        condition: Callable[[], bool],
        process: "subprocess.Popen[bytes]",
        what: str,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Wait until a condition holds while a process lives; raises BenchmarkError."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if process.poll() not in {None, 0} or time.monotonic() > deadline_s:
                raise BenchmarkError(f"waited for {what}, but: {self.output(process)[-2000:] or 'no word'}")
            time.sleep(POLL_S)

    def end(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill a process and everything it started: nothing here is worth an orderly end."""
        send_signal(family_of(process.pid) if process.poll() is None else [], signal.SIGKILL)
        process.wait()

    def _log(self, arguments: Sequence[str]) -> Path:
        # The same arguments mean the same process here: one at a time.
        return self.path / f"{abs(hash(tuple(arguments))):x}.log"


def progress(line: str) -> None:
    """Say how far it is."""
    print(f"  {line}", flush=True)  # noqa: T201 - a command line


def fetch(url: str, path: str) -> bytes:
    """Get a page; raises OSError when it is not there."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5.0)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise ConnectionError(f"{url}{path}: {response.status}")
    return body


def family_of(pid: int) -> list[psutil.Process]:
    """A process, if it is there, and all that it started."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal those that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its living children."""
    return sum(sum(one.cpu_times()[:2]) for one in family_of(pid))
