"""Keeps the right uploading child running, and never waits for it.

One child at a time, for the run that was served least recently, new runs first. The daemon calls `tick`, which reads
what the child has said without blocking and decides: a child that is silent for too long is killed, one that ended is
replaced after a growing pause, a run whose sessions have all ended is closed on the server by a child of its own.
"""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sidecar.sinks.wandb_history import RunHistory
from sidecar.sinks.wandb_process import ChildProcess
from sidecar.sinks.wandb_protocol import Attached, Closed, Failed, Message, Progress, Task
from sidecar.sinks.wandb_run import SpooledRun, owner_name
from sidecar.sinks.wandb_secrets import api_key, redact_logs
from sidecar.sinks.wandb_settings import NO_CREDENTIALS, WandbSettings, child_environment, has_credentials
from sidecar.sinks.wandb_spool import Spool

_LOG = logging.getLogger(__name__)
_CREDENTIALS_RETRY_S = 5.0
_MIN_PAUSE_S = 0.2


class SinkState(msgspec.Struct, frozen=True):
    """off, offline, no-credentials, idle, starting, running, waiting, conflict or refused; why.

    The lag is the number of rows that W&B was not yet seen to have.
    """

    state: str
    lag_records: int
    detail: str = ""


class WandbSupervisor:
    """Uploads everything in the spool. `tick` and `close` belong to one thread; `state` may be called from any.

    Args:
        spool_path: the spool; wandb's files go to `wandb/` beside it.
        settings: how.
        environ: where credentials and proxies are taken from.
    """

    def __init__(self, spool_path: Path, settings: WandbSettings, environ: Mapping[str, str]) -> None:
        self._spool_path = spool_path
        self._spool = Spool(spool_path)
        self._owner = owner_name(spool_path)
        self._settings = settings
        self._environ = environ
        self._directory = spool_path.parent / "wandb"
        self._child: ChildProcess | None = None
        self._histories: dict[str, RunHistory] = {}
        self._next_start_s = float("-inf")
        self._phase = ("idle", "")
        self._state = SinkState("idle", 0)
        self.is_damaged = False
        """Whether a child found the spool damaged."""

    def tick(self, now_s: float) -> None:
        """Look after the child; never blocks. `now_s` is monotonic."""
        if self._settings.mode != "online":
            self._phase = (self._settings.mode, "rows stay in the spool until `dflash-sidecar push`")
        elif self._child is not None:
            self._look_after(self._child, now_s)
        elif now_s >= self._next_start_s:
            self._start(now_s)
        lag = sum(run.num_unconfirmed + self._history(run.run_id).num_forgotten for run in self._spool.open_runs())
        self._state = SinkState(self._phase[0], lag, self._phase[1])

    def state(self) -> SinkState:
        """What the last tick found."""
        return self._state

    def close(self, timeout_s: float | None = None) -> None:
        """Let the child send what it has in hand, by default for as long as it may take to finish, and end it."""
        if self._child is not None:
            self._child.end(self._settings.finish_timeout_s + 1.0 if timeout_s is None else timeout_s)
            self._reap(self._child, time.monotonic())
        self._spool.close()

    def _candidates(self, now_s: float) -> list[SpooledRun]:
        """Runs with something to do now, in the order they get their turn."""
        due = [run for run in self._spool.open_runs() if run.num_rows and self._is_due(run, now_s)]
        return sorted(due, key=lambda run: self._history(run.run_id).served_s)

    def _is_due(self, run: SpooledRun, now_s: float) -> bool:
        history = self._history(run.run_id)
        if self._child is not None and run.run_id == self._child.run_id:
            return False
        return now_s >= history.retry_s and (not history.drained or run.num_waiting > 0 or run.exit_code is not None)

    def _history(self, run_id: str) -> RunHistory:
        return self._histories.setdefault(run_id, RunHistory())

    def _start(self, now_s: float) -> None:
        candidates = self._candidates(now_s)
        if not candidates:
            if all(history.failure is None for history in self._histories.values()):
                self._phase = ("idle", "")
            return
        if not has_credentials(self._environ):
            self._phase = ("no-credentials", NO_CREDENTIALS)
            self._next_start_s = now_s + _CREDENTIALS_RETRY_S
            return
        run = candidates[0]
        history = self._history(run.run_id)
        history.served_s = now_s
        closing = history.drained and run.num_waiting == 0
        task = self._task(run, history, now_s, closing=closing)
        self._child = ChildProcess(task, child_environment(self._environ, self._directory), now_s)
        self._phase = ("starting", history.failure.detail if history.failure else "")

    def _task(self, run: SpooledRun, history: RunHistory, now_s: float, *, closing: bool) -> Task:
        shared = {
            name: getattr(self._settings, name) for name in Task.__struct_fields__ if hasattr(self._settings, name)
        }
        return Task(
            spool=str(self._spool_path),
            run_id=run.run_id,
            owner=self._owner,
            directory=str(self._directory),
            exit_code=run.exit_code if closing else None,
            stopped_at_row=history.stopped_at_row,
            settled=history.settled(now_s, self._settings.quiet_s),
            parent_pid=os.getpid(),
            **shared,
        )

    def _look_after(self, child: ChildProcess, now_s: float) -> None:
        for message in child.read():
            child.heard_s = now_s
            self._hear(child, message)
        if child.process.poll() is not None:
            self._reap(child, now_s)
        elif now_s > child.heard_s + self._settings.hang_timeout_s:
            child.failure = Failed("unreachable", f"made no progress for {self._settings.hang_timeout_s:g} s, killed")
            child.process.kill()
        elif (
            child.is_attached
            and now_s > child.started_s + self._settings.slice_s
            and not child.leaving
            and self._candidates(now_s)
        ):
            child.leaving = True
            child.process.terminate()

    def _hear(self, child: ChildProcess, message: Message) -> None:
        if isinstance(message, Attached):
            child.is_attached = True
            child.started_s = child.heard_s
            self._history(child.run_id).note_attached()
            self._spool.set_base_step(child.run_id, message.base_step)
            self._spool.set_confirmed(child.run_id, message.next_row, message.num_lines)
            self._note_sent(child, message.next_row)
            self._phase = ("running", "")
        elif isinstance(message, Progress):
            self._note_sent(child, message.next_row)
            run = self._spool.run(child.run_id)
            if (message.num_confirmed, message.num_lines) != (run.num_confirmed, run.num_lines):
                self._spool.set_confirmed(child.run_id, message.num_confirmed, message.num_lines)
            asked = "a stop was requested in the W&B UI; it does not stop the training"
            self._phase = ("running", asked if message.stop_requested else "")
        elif isinstance(message, Closed):
            self._spool.set_closed(child.run_id, time.time())
            if message.num_missing:
                self._spool.count_dropped(message.num_missing)
                _LOG.error(
                    "W&B run %s: %d rows never arrived: something on the way answered in the place of W&B",
                    *(child.run_id, message.num_missing),
                )
        else:
            child.failure = message

    def _note_sent(self, child: ChildProcess, num_sent: int) -> None:
        if child.num_sent is not None and num_sent > child.num_sent:
            self._history(child.run_id).note_growth()
        if num_sent != child.num_sent:
            child.num_sent = num_sent
            self._spool.set_sent(child.run_id, num_sent)

    def _reap(self, child: ChildProcess, now_s: float) -> None:
        for message in child.read():
            self._hear(child, message)
        child.close()
        redact_logs(self._directory, api_key(self._environ))
        self._child = None
        self._next_start_s = now_s + _MIN_PAUSE_S
        history = self._history(child.run_id)
        code = child.process.returncode
        if code == 0 and child.failure is None:
            history.note_peace(drained=self._spool.run(child.run_id).num_waiting == 0)
            return
        failure = child.failure or Failed("unreachable", f"the uploading process ended with code {code}")
        if history.failure is None or history.failure.reason != failure.reason:
            _LOG.warning("W&B run %s: %s: %s", child.run_id, failure.reason, failure.detail)
        history.note_failure(failure, now_s, self._settings, was_attached=child.is_attached)
        self.is_damaged |= failure.reason == "damaged"
        if failure.reason == "behind" and failure.sighting is not None:
            history.num_forgotten = self._spool.run(child.run_id).num_lines - failure.sighting.num_lines
        if failure.reason == "stopped":
            history.stopped_at_row = child.num_sent
        self._phase = (history.phase, failure.detail)
