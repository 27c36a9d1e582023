"""Uploads one run from the spool to W&B: `python -m sidecar.sinks.wandb_child`, started by the supervisor.

A process of its own, because wandb may hang, exit or raise KeyboardInterrupt where it likes, and because killing it is
harmless: the spool numbers rows densely, W&B counts the lines it has, and a new child goes on from `run.starting_step`.
Facts behind the calls here (wandb 0.31):

* Only `commit=True` sends a row at once; a row whose step is lower than the server's is dropped, never repeated.
* `run.step` is 0 right after a resume; `run.starting_step` is right.
* A resume forgets all earlier metric definitions, so all are made again each time, by exact name.
* `x_update_finish_state=False` lets `finish()` send what is left without marking the run finished.
* `stop_fn` is called within 15 s for a stop in the UI and, because of `stop_on_fatal_error`, when uploading has ended
  for good; it does not say which. So the child sends what it can and leaves. If the server then turns out to have every
  row, uploading worked, and the next child takes a stop for one from the UI, which concerns us no further. Without
  `stop_fn` wandb interrupts the main thread.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import wandb
from wandb.errors import AuthenticationError, CommError, Error, UsageError

from sidecar.sinks.wandb_protocol import Attached, Closed, Failed, Message, Progress, Task, encode_line
from sidecar.sinks.wandb_rows import STEP_AXIS, TIME_AXIS
from sidecar.sinks.wandb_secrets import redacted
from sidecar.sinks.wandb_spool import Row, Spool

_PR_SET_PDEATHSIG = 1
_LOCK_TIMEOUT_S = 5.0
_BASE_TIMEOUT_S = 30.0
_POLL_S = 0.2
_HEARTBEAT_S = 1.0
_BATCH_ROWS = 100
_REFUSED_SHARE = 0.9
"""wandb retries whatever may pass until `init_timeout`; an error well before that is the server's last word."""


class GiveUp(Exception):  # noqa: N818 - carries the reason to the end of `main`, which reports it
    """The child cannot go on."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure)
        self.failure = failure


class Uploader:
    """Sends the rows of one run.

    Args:
        task: what to do.
        spool: opened read-only.
        pipe: file descriptor that the supervisor reads.
    """

    def __init__(self, task: Task, spool: Spool, pipe: int) -> None:
        self._task = task
        self._spool = spool
        self._pipe = pipe
        self._started_s = time.monotonic()
        self._stop = threading.Event()
        self._terminated = False
        self._stop_is_from_ui = False
        self._said_s = float("-inf")
        self._defined: set[str] = set()

    def terminate(self, _signal: int, _frame: object) -> None:
        """Handle SIGTERM: send what is under way and leave."""
        self._terminated = True

    def run(self) -> None:
        """Do the task; raises GiveUp."""
        run = self._attach()
        self._started_s = time.monotonic()
        base_step = self._base_step(run.starting_step)
        next_row = max(run.starting_step - base_step, 0)
        self._stop_is_from_ui = self._task.stopped_at_row is not None and next_row >= self._task.stopped_at_row
        self._define(run, self._spool.keys(self._task.run_id))
        if self._task.exit_code is None:
            self._stream(run, base_step, next_row)
            self._finish(run, 0)
        elif next_row < self._spool.num_rows(self._task.run_id):
            raise GiveUp(Failed("incomplete", f"the server has {next_row} rows, the spool more"))
        else:
            self._finish(run, self._task.exit_code)
            self.say(Closed())

    def say(self, message: Message) -> None:
        """Write one line to the supervisor."""
        os.write(self._pipe, encode_line(message) + b"\n")
        self._said_s = time.monotonic()

    def _attach(self) -> wandb.Run:
        closing = self._task.exit_code is not None
        started_s = time.monotonic()
        settings = wandb.Settings(
            init_timeout=self._task.init_timeout_s,
            finish_timeout=self._task.finish_timeout_s,
            finish_timeout_raises=True,
            stop_fn=self._stop.set,
            stop_on_fatal_error=True,
            x_update_finish_state=closing,
            x_file_stream_transmit_interval=self._task.transmit_interval_s,
            console="off",
            quiet=True,
            silent=True,
            disable_git=True,
            disable_code=True,
            x_save_requirements=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
        )
        try:
            run = wandb.init(
                id=self._task.run_id,
                name=self._task.run_id,
                resume="must" if closing else "allow",
                project=self._task.project,
                entity=self._task.entity or None,
                config=self._spool.config(self._task.run_id),
                dir=self._task.directory,
                settings=settings,
            )
        except (Error, TimeoutError, ConnectionError) as error:
            retried = time.monotonic() - started_s > self._task.init_timeout_s * _REFUSED_SHARE
            raise GiveUp(_failure(error, retried=retried)) from error
        self.say(Attached(run.starting_step))
        return run

    def _base_step(self, starting_step: int) -> int:
        """Wait until the supervisor has written down which step row 0 has."""
        deadline_s = time.monotonic() + _BASE_TIMEOUT_S
        while time.monotonic() < deadline_s:
            base_step = self._spool.run(self._task.run_id).base_step
            if base_step is not None:
                return base_step
            time.sleep(_POLL_S / 10)
        raise GiveUp(Failed("incomplete", f"nobody wrote down where step {starting_step} belongs"))

    def _stream(self, run: wandb.Run, base_step: int, next_row: int) -> None:
        last_row = next_row + self._task.max_rows
        while not self._terminated and not self._is_stopped() and next_row < last_row:
            rows = self._spool.rows(self._task.run_id, next_row, _BATCH_ROWS)
            for index, row in rows:
                self._log(run, row, base_step + index)
                next_row = index + 1
            if rows or time.monotonic() > self._said_s + _HEARTBEAT_S:
                self.say(Progress(next_row, self._stop.is_set()))
            if not rows and self._is_done():
                return
            time.sleep(len(rows) / self._task.rows_per_second if rows else _POLL_S)

    def _is_done(self) -> bool:
        over = self._spool.run(self._task.run_id).exit_code is not None
        return over or self._task.until_drained or time.monotonic() > self._started_s + self._task.max_life_s

    def _is_stopped(self) -> bool:
        return self._stop.is_set() and not self._stop_is_from_ui

    def _log(self, run: wandb.Run, row: Row, step: int) -> None:
        self._define(run, row)
        try:
            run.log(row, step=step, commit=True)
        except (Error, ConnectionError) as error:
            raise GiveUp(Failed("unreachable", f"wandb-core is gone: {error}")) from error

    def _define(self, run: wandb.Run, keys: "list[str] | Row") -> None:
        for key in keys:
            if key in self._defined or key.startswith("_"):
                continue
            if not self._defined:
                run.define_metric(STEP_AXIS)
                run.define_metric(TIME_AXIS)
                self._defined |= {STEP_AXIS, TIME_AXIS}
            if key not in self._defined:
                run.define_metric(key, step_metric=STEP_AXIS if key.startswith("train/") else TIME_AXIS)
                self._defined.add(key)

    def _finish(self, run: wandb.Run, exit_code: int) -> None:
        try:
            run.finish(exit_code=exit_code)
        except TimeoutError as error:
            raise GiveUp(Failed("unreachable", "what was left could not be sent in time")) from error
        if self._is_stopped():
            raise GiveUp(Failed("stopped", "W&B stopped taking rows, or a stop was requested in its UI"))


def _failure(error: Exception, *, retried: bool) -> Failed:
    text = redacted(" ".join(str(error).split()), os.environ.get("WANDB_API_KEY", ""))
    refused = isinstance(error, AuthenticationError | UsageError) or (isinstance(error, CommError) and not retried)
    return Failed("refused" if refused else "unreachable", text[:500])


def _die_with_parent(parent_pid: int) -> None:
    """Be killed when the supervisor ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def _lock(path: Path) -> None:
    """Hold the lock on uploading from this spool for the life of the process; raises GiveUp."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline_s:
                raise GiveUp(Failed("busy", f"another process uploads this spool ({path} is locked)")) from error
            time.sleep(_POLL_S / 4)


def main() -> NoReturn:
    """Read the task from stdin, do it, and exit with 0 when all that was handed over has been sent."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    _die_with_parent(task.parent_pid)
    pipe = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever wandb prints must not be taken for a message
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uploader = Uploader(task, Spool(Path(task.spool), read_only=True), pipe)
    signal.signal(signal.SIGTERM, uploader.terminate)
    directory = Path(task.directory)
    try:
        _lock(directory / "upload.lock")
        shutil.rmtree(directory / "wandb", ignore_errors=True)  # files of earlier children: the spool has it all
        uploader.run()
    except GiveUp as gave_up:
        uploader.say(gave_up.failure)
        os._exit(1)  # wandb's own exit hooks would wait for the server
    os._exit(0)


if __name__ == "__main__":
    main()
