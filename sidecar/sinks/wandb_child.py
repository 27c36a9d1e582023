"""Uploads one run from the spool to W&B: `python -m sidecar.sinks.wandb_child`, started by the supervisor.

A process of its own, because wandb may hang, exit or raise KeyboardInterrupt where it likes, and because killing it is
harmless: the spool numbers rows densely, W&B counts the lines it has, and a new child goes on behind them.
Facts behind the calls here (wandb 0.31):

* Only `commit=True` sends a row at once; a row whose step is lower than the server's is dropped, never repeated.
* After `stop_fn` was called the child sends what it can and leaves. If the server then turns out to have every row,
  uploading worked, and the next child takes a stop for one from the UI, which concerns us no further.

The child looks at the server before it attaches and every few seconds after that. So it notices another writer, a run
that was deleted, uploads that ended for good, and it says what has really arrived. When it cannot see the server for
`lease_s` it leaves at once, unsent rows and all: by then another sidecar may have taken the run over.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import sqlite3
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec
import wandb
from wandb.errors import Error

from sidecar.database import is_corruption
from sidecar.sinks.wandb_attach import attach, define, without_key
from sidecar.sinks.wandb_lookup import Lookup, LookupFailedError, ServerRun
from sidecar.sinks.wandb_position import Position, position
from sidecar.sinks.wandb_protocol import (
    Attached,
    Closed,
    Failed,
    GiveUp,
    Message,
    Progress,
    Sighting,
    Task,
    encode_line,
)
from sidecar.sinks.wandb_run import STEP_AXIS, Row
from sidecar.sinks.wandb_spool import Spool

_PR_SET_PDEATHSIG = 1
_LOCK_TIMEOUT_S = 5.0
_BASE_TIMEOUT_S = 30.0
_POLL_S = 0.2
_HEARTBEAT_S = 1.0
_BATCH_ROWS = 100


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
        self._lookup = Lookup(task.project, task.entity, task.look_timeout_s)
        self._first = Attached(0, 0, 0)
        self._next_row = 0
        self._num_confirmed = 0
        self._num_lines = 0
        self._seen_s = time.monotonic()
        """When the server was last seen to be ours."""
        self._grown_s = time.monotonic()
        """When it last had more rows, or all."""

    def terminate(self, _signal: int, _frame: object) -> None:
        """Handle SIGTERM: send what is under way and leave."""
        self._terminated = True

    def run(self) -> None:
        """Do the task; raises GiveUp."""
        task, spooled = self._task, self._spool.run(self._task.run_id)
        server = self._look_before()
        run = attach(task, self._spool.config(task.run_id), self._stop.set)
        place = position(self._spool, task.run_id, server, run.starting_step, task.owner)
        self._begin(place, server)
        self._stop_is_from_ui = task.stopped_at_row is not None and place.next_row >= task.stopped_at_row
        define(run, self._spool.keys(task.run_id), self._defined)
        if task.exit_code is None:
            self._stream(run, place.base_step)
            self._finish(run, 0)
            self._look_after()
        elif place.next_row < spooled.num_rows:
            raise GiveUp(Failed("incomplete", f"W&B has {place.next_row} rows, the spool {spooled.num_rows}"))
        else:
            self._finish(run, task.exit_code)
            num_lines = self._check_end()
            self.say(Closed(max(spooled.num_unconfirmed - (num_lines - spooled.num_lines), 0)))

    def say(self, message: Message) -> None:
        """Write one line to the supervisor."""
        os.write(self._pipe, encode_line(message) + b"\n")
        self._said_s = time.monotonic()

    def _look_before(self) -> ServerRun | None:
        """See whether the server is as this spool left it, or has settled otherwise."""
        server = self._look()
        sighting = Sighting(server.owner, server.num_lines) if server else Sighting("", 0)
        if sighting != self._task.settled:
            self._check_owner(sighting)
            expected = self._spool.run(self._task.run_id).num_lines
            if sighting.num_lines < expected:
                text = f"W&B has {sighting.num_lines} rows of this run, it had {expected}: deleted, or not up to date"
                raise GiveUp(Failed("behind", text, sighting))
        self._seen_s = self._grown_s = time.monotonic()
        return server

    def _look(self) -> ServerRun | None:
        try:
            return self._lookup.find(self._task.run_id)
        except LookupFailedError as error:
            raise GiveUp(Failed("refused" if error.refused else "unreachable", without_key(str(error)))) from error

    def _check_owner(self, sighting: Sighting) -> None:
        if sighting.owner not in {"", self._task.owner}:
            text = (
                "another sidecar, or an earlier spool, writes this run: let one sidecar upload it and set "
                f"wandb.mode=off on the other, or give the run another run.id (its spool is {sighting.owner})"
            )
            raise GiveUp(Failed("contested", text, sighting))

    def _begin(self, place: Position, server: ServerRun | None) -> None:
        """Tell the supervisor the place, and wait until it has written down which step row 0 has."""
        self._num_lines = server.num_lines if server else 0
        self._next_row = self._num_confirmed = place.next_row
        self._first = Attached(place.base_step, place.next_row, self._num_lines)
        self.say(self._first)
        deadline_s = time.monotonic() + _BASE_TIMEOUT_S
        while self._spool.run(self._task.run_id).base_step != place.base_step:
            if time.monotonic() > deadline_s:
                raise GiveUp(Failed("incomplete", f"nobody wrote down that row 0 has step {place.base_step}"))
            time.sleep(_POLL_S / 10)

    def _stream(self, run: wandb.Run, base_step: int) -> None:
        last_row = self._next_row + self._task.max_rows
        next_look_s = time.monotonic() + self._task.look_interval_s
        while not self._terminated and not self._is_stopped() and self._next_row < last_row:
            rows = self._spool.rows(self._task.run_id, self._next_row, _BATCH_ROWS)
            if rows and rows[0][0] != self._next_row:
                raise GiveUp(Failed("incomplete", "rows were dropped to bound the spool"))
            for index, row in rows:
                define(run, dict.fromkeys(row, STEP_AXIS in row), self._defined)
                _log(run, row, base_step + index)
                self._next_row = index + 1
            if time.monotonic() > next_look_s:
                self._look_on()
                next_look_s = time.monotonic() + self._task.look_interval_s
            if rows or time.monotonic() > self._said_s + _HEARTBEAT_S:
                self._say_progress()
            if not rows and self._is_done():
                return
            time.sleep(len(rows) / self._task.rows_per_second if rows else _POLL_S)

    def _say_progress(self) -> None:
        self.say(Progress(self._next_row, self._num_confirmed, self._num_lines, self._stop.is_set()))

    def _look_on(self) -> None:
        """See whether the run is still ours and grows; what is unsent when it is not must stay unsent."""
        now_s = time.monotonic()
        try:
            server = self._lookup.find(self._task.run_id)
        except LookupFailedError as error:
            if now_s > self._seen_s + self._task.lease_s:
                raise GiveUp(Failed("unreachable", without_key(str(error)))) from error
            return
        sighting = Sighting(server.owner, server.num_lines) if server else Sighting("", 0)
        self._check_owner(sighting)
        if server is None:
            raise GiveUp(Failed("behind", "W&B has this run no more", sighting))
        num_confirmed = self._first.next_row + sighting.num_lines - self._first.num_lines
        if num_confirmed > self._num_confirmed or self._num_confirmed == self._next_row:
            self._grown_s = now_s
        self._seen_s = now_s
        self._num_confirmed = max(self._num_confirmed, min(num_confirmed, self._next_row))
        self._num_lines = max(self._num_lines, sighting.num_lines)
        if now_s > self._grown_s + self._task.stall_s:
            raise GiveUp(Failed("unreachable", f"W&B answers, but has taken no row for {self._task.stall_s:g} s"))

    def _look_after(self) -> None:
        """After everything was sent in peace, say what has arrived."""
        if not self._terminated:
            self._look_on()
            self._say_progress()

    def _check_end(self) -> int:
        """See that the run is marked as ended, which `finish` does not tell; returns its number of rows."""
        deadline_s = time.monotonic() + self._task.look_timeout_s
        while (server := self._look()) is not None:
            if server.state != "running":
                return server.num_lines
            if time.monotonic() > deadline_s:
                raise GiveUp(Failed("unreachable", "W&B does not mark the run as ended"))
            time.sleep(_POLL_S)
        raise GiveUp(Failed("behind", "W&B has this run no more", Sighting("", 0)))

    def _is_done(self) -> bool:
        over = self._spool.run(self._task.run_id).exit_code is not None
        return over or self._task.until_drained or time.monotonic() > self._started_s + self._task.max_life_s

    def _is_stopped(self) -> bool:
        return self._stop.is_set() and not self._stop_is_from_ui

    def _finish(self, run: wandb.Run, exit_code: int) -> None:
        try:
            run.finish(exit_code=exit_code)
        except TimeoutError as error:
            raise GiveUp(Failed("unreachable", "what was left could not be sent in time")) from error
        if self._is_stopped():
            raise GiveUp(Failed("stopped", "W&B stopped taking rows, or a stop was requested in its UI"))


def _log(run: wandb.Run, row: Row, step: int) -> None:
    try:
        run.log(row, step=step, commit=True)
    except (Error, ConnectionError) as error:
        raise GiveUp(Failed("unreachable", f"wandb-core is gone: {error}")) from error


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


def _upload(task: Task, pipe: int) -> Failed | None:
    """Do the task; returns why it could not be done."""
    directory = Path(task.directory)
    try:
        _lock(directory / "upload.lock")
        shutil.rmtree(directory / "wandb", ignore_errors=True)  # files of earlier children: the spool has it all
        uploader = Uploader(task, Spool(Path(task.spool), read_only=True), pipe)
        signal.signal(signal.SIGTERM, uploader.terminate)
        uploader.run()
    except GiveUp as gave_up:
        return gave_up.failure
    except sqlite3.DatabaseError as error:
        if not is_corruption(error):
            raise
        return Failed("damaged", str(error))
    return None


def main() -> NoReturn:
    """Read the task from stdin, do it, and exit with 0 when all that was handed over has been sent."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    _die_with_parent(task.parent_pid)
    pipe = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever wandb prints must not be taken for a message
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 1
    try:
        if (failure := _upload(task, pipe)) is None:
            code = 0
        else:
            os.write(pipe, encode_line(failure) + b"\n")
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(code)  # wandb's own exit hooks would wait for the server


if __name__ == "__main__":
    main()
