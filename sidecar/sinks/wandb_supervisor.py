"""Keeps the right uploading child running, and never waits for it.

One child at a time, for the run that was served least recently, new runs first. The daemon calls `tick`, which reads
what the child has said without blocking and decides: a child that is silent for too long is killed, one that ended is
replaced after a growing pause, a run whose sessions have all ended is closed on the server by a child of its own.
"""

import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sidecar.sinks.wandb_protocol import Attached, Closed, Failed, Message, Progress, Task, decode_line
from sidecar.sinks.wandb_secrets import api_key, redact_logs
from sidecar.sinks.wandb_settings import NO_CREDENTIALS, WandbSettings, child_environment, has_credentials
from sidecar.sinks.wandb_spool import Spool, SpooledRun

_LOG = logging.getLogger(__name__)
_CREDENTIALS_RETRY_S = 5.0
_MIN_PAUSE_S = 0.2


class SinkState(msgspec.Struct, frozen=True):
    """off, offline, no-credentials, idle, starting, running, waiting or refused; rows not yet handed to W&B; why."""

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
        self._settings = settings
        self._environ = environ
        self._directory = spool_path.parent / "wandb"
        self._child: _Child | None = None
        self._histories: dict[str, _History] = {}
        self._next_start_s = float("-inf")
        self._phase = ("idle", "")
        self._state = SinkState("idle", 0)

    def tick(self, now_s: float) -> None:
        """Look after the child; never blocks. `now_s` is monotonic."""
        if self._settings.mode != "online":
            self._phase = (self._settings.mode, "rows stay in the spool until `dflash-sidecar push`")
        elif self._child is not None:
            self._look_after(self._child, now_s)
        elif now_s >= self._next_start_s:
            self._start(now_s)
        lag = sum(run.num_waiting for run in self._spool.open_runs())
        self._state = SinkState(self._phase[0], lag, self._phase[1])

    def state(self) -> SinkState:
        """What the last tick found."""
        return self._state

    def close(self, timeout_s: float | None = None) -> None:
        """Let the child send what it has in hand, by default for as long as it may take to finish, and end it."""
        if self._child is not None:
            self._child.process.terminate()
            try:
                self._child.process.wait(self._settings.finish_timeout_s + 1.0 if timeout_s is None else timeout_s)
            except subprocess.TimeoutExpired:
                self._child.process.kill()
                self._child.process.wait()
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

    def _history(self, run_id: str) -> "_History":
        return self._histories.setdefault(run_id, _History())

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
        task = self._task(run.run_id, run.exit_code if closing else None, history.stopped_at_row)
        self._child = _Child(task, child_environment(self._environ, self._directory), now_s)
        self._phase = ("starting", history.failure.detail if history.failure else "")

    def _task(self, run_id: str, exit_code: int | None, stopped_at_row: int | None) -> Task:
        shared = {
            name: getattr(self._settings, name) for name in Task.__struct_fields__ if hasattr(self._settings, name)
        }
        return Task(
            spool=str(self._spool_path),
            run_id=run_id,
            directory=str(self._directory),
            exit_code=exit_code,
            stopped_at_row=stopped_at_row,
            parent_pid=os.getpid(),
            **shared,
        )

    def _look_after(self, child: "_Child", now_s: float) -> None:
        for message in child.read():
            child.heard_s = now_s
            self._hear(child, message)
        if child.process.poll() is not None:
            self._reap(child, now_s)
        elif now_s > child.heard_s + self._settings.hang_timeout_s:
            child.failure = Failed("unreachable", f"made no progress for {self._settings.hang_timeout_s:g} s, killed")
            child.process.kill()
        elif now_s > child.started_s + self._settings.slice_s and not child.leaving and self._candidates(now_s):
            child.leaving = True
            child.process.terminate()

    def _hear(self, child: "_Child", message: Message) -> None:
        if isinstance(message, Attached):
            self._spool.set_base_step(child.run_id, message.starting_step)
            base_step = self._spool.run(child.run_id).base_step or 0
            self._note_sent(child, max(message.starting_step - base_step, 0))
            self._phase = ("running", "")
        elif isinstance(message, Progress):
            self._note_sent(child, message.next_row)
            asked = "a stop was requested in the W&B UI; it does not stop the training"
            self._phase = ("running", asked if message.stop_requested else "")
        elif isinstance(message, Closed):
            self._spool.set_closed(child.run_id, time.time())
        else:
            child.failure = message

    def _note_sent(self, child: "_Child", num_sent: int) -> None:
        if child.num_sent is not None and num_sent > child.num_sent:
            self._history(child.run_id).num_failures = 0
        if num_sent != child.num_sent:
            child.num_sent = num_sent
            self._spool.set_sent(child.run_id, num_sent)

    def _reap(self, child: "_Child", now_s: float) -> None:
        for message in child.read():
            self._hear(child, message)
        child.close()
        redact_logs(self._directory, api_key(self._environ))
        self._child = None
        self._next_start_s = now_s + _MIN_PAUSE_S
        history = self._history(child.run_id)
        code = child.process.returncode
        if code == 0 and child.failure is None:
            history.drained = self._spool.run(child.run_id).num_waiting == 0
            history.failure = None
            history.num_failures = 0
            return
        failure = child.failure or Failed("unreachable", f"the uploading process ended with code {code}")
        if history.failure is None or history.failure.reason != failure.reason:
            _LOG.warning("W&B run %s: %s: %s", child.run_id, failure.reason, failure.detail)
        history.drained = False
        history.failure = failure
        if failure.reason == "stopped":
            history.stopped_at_row = child.num_sent
        pause_s = min(self._settings.min_backoff_s * 2**history.num_failures, self._settings.max_backoff_s)
        if failure.reason == "refused":
            pause_s = max(pause_s, self._settings.refused_backoff_s)
        history.num_failures = min(history.num_failures + 1, 30)
        history.retry_s = now_s + pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads restarts, hides nothing
        self._phase = ("refused" if failure.reason == "refused" else "waiting", failure.detail)


class _History:
    """What happened to a run's children since the start."""

    def __init__(self) -> None:
        self.served_s = float("-inf")
        self.retry_s = float("-inf")
        self.num_failures = 0
        self.failure: Failed | None = None
        self.stopped_at_row: int | None = None
        self.drained = False
        """Whether a child ended in peace after handing over every row; only a look at the server proves more."""


class _Child:
    """One uploading process and its pipe."""

    def __init__(self, task: Task, environment: Mapping[str, str], now_s: float) -> None:
        self.run_id = task.run_id
        self.started_s = self.heard_s = now_s
        self.leaving = False
        self.num_sent: int | None = None
        self.failure: Failed | None = None
        self._buffer = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sidecar.sinks.wandb_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal is for the sidecar alone, which then ends its child
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdout = self.process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        with self.process.stdin as stdin:
            stdin.write(msgspec.json.encode(task) + b"\n")  # far less than a pipe holds

    def read(self) -> list[Message]:
        """All messages that have arrived in full."""
        while part := self._stdout.read(65536):
            self._buffer += part
        *lines, self._buffer = self._buffer.split(b"\n")
        return [decode_line(line) for line in lines]

    def close(self) -> None:
        """Close the pipe of an ended process."""
        self._stdout.close()
