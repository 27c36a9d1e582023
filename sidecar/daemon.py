"""The life of the sidecar: build everything, run the main loop, close in reverse order.

The main thread owns the pipeline, the definitions and the spool. Others only hand it something: the receiver through
the journal, collectors through their newest reading, HTTP and signals through a flag and the alarm. HTTP begins to
answer once the past that the definitions need has been read again, so that no scrape sees less than the one before a
restart.
"""

import logging
import signal
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from sidecar.collectors.host import HostCollector
from sidecar.collectors.nvml import NvmlCollector
from sidecar.collectors.process import ProcessCollector
from sidecar.collectors.runner import CollectorRunner
from sidecar.config import SidecarConfig
from sidecar.database import is_corruption, mark_damaged
from sidecar.http import HttpServer
from sidecar.intake import Intake
from sidecar.journal import Journal
from sidecar.live_definitions import LiveDefinitions
from sidecar.outlet import WandbOutlet
from sidecar.pipeline import Pipeline
from sidecar.publication import CATALOGUE, Publication
from sidecar.receiver import Receiver
from sidecar.sinks.prometheus import PrometheusSink
from sidecar.state_dir import StateDir
from sidecar.systemd import Notifier
from sidecar.wake import Alarm

JOURNAL_NAME = "journal.sqlite"
CATCH_UP_S = 2.0
"""How long the first scrape may wait for the past to be read again."""
FIRST_READINGS_S = 0.2
"""How long it may wait for host, process and GPU."""
NUM_COLLECTORS = 3
TRIM_INTERVAL_S = 60.0
RELOAD_TIMEOUT_S = 10.0
HISTORY_MARGIN_S = 60.0
_log = logging.getLogger(__name__)


class SidecarError(ValueError):
    """The sidecar cannot go on; the message is meant for the user."""


class ReloadRequest:
    """A reload asked for by another thread, and its answer."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.problem: str | None = None


class Daemon:
    """One sidecar. Build it, `run` it, `close` it; all on the main thread.

    Args:
        config: the settings.
        state_dir: held by the caller.
        runtime_dir: where trainers' endpoints are.
        environ: the process environment.

    Raises:
        ValueError: something cannot be used (port, files, definitions); the message is meant for the user.
    """

    def __init__(
        self, config: SidecarConfig, state_dir: StateDir, runtime_dir: Path, environ: Mapping[str, str]
    ) -> None:
        self._config = config
        self._runtime_dir = runtime_dir
        self._alarm = Alarm()
        self._should_stop = False
        self._is_ready = False
        self._reloads: deque[ReloadRequest] = deque()
        self._next_trim_s = 0.0
        self._notifier = Notifier(environ)
        self._sink = PrometheusSink()
        with ExitStack() as stack:
            self._http = HttpServer(
                listen=config.address,
                sink=self._sink,
                status=lambda: msgspec.to_builtins(self._publication.document),
                reload=self.reload,
                ready=lambda: self._is_ready,
            )
            stack.callback(self._http.close)
            self._journal = Journal(state_dir.path / JOURNAL_NAME)
            stack.callback(self._journal.close)
            self._journal_path = state_dir.path / JOURNAL_NAME
            self._definitions = LiveDefinitions(
                Path(config.definitions) if config.definitions else None,
                state_dir.path,
                CATALOGUE,
                lambda outcome: self._journal.count("reloads", outcome),
            )
            self._outlet = WandbOutlet(config.wandb, state_dir.path, self._journal, self._row_values, environ)
            stack.callback(self._outlet.close)
            self._pipeline = Pipeline(self._journal, self._outlet.row_feed)
            self._collectors = CollectorRunner(
                [
                    HostCollector({"state": state_dir.path}),
                    ProcessCollector(lambda: self._pipeline.trainers),
                    NvmlCollector(),
                ],
                config.collectors.interval_s,
                config.collectors.deadline_s,
            )
            stack.callback(self._collectors.close)
            self._receiver = Receiver(Intake(self._journal, uuid.uuid4().hex[:12], time.monotonic()), runtime_dir)
            stack.callback(self._receiver.close)
            self._publication = Publication(self._journal, self._pipeline, self._definitions, self._outlet)
            self._publication.introduce(self._url(), state_dir.path, runtime_dir)
            state_dir.announce(self._url())
            self._closing = stack.pop_all()

    def run(self) -> None:
        """Live until told to stop; raises SidecarError when that is not possible."""
        with self._signals():
            try:
                self._start()
                while not self._should_stop:
                    started_s = time.monotonic()
                    self._turn()
                    self._alarm.sleep(started_s + self._config.interval_s - time.monotonic())
            except sqlite3.Error as error:
                raise self._file_failure(error) from error

    def close(self) -> None:
        """Stop everything in reverse order of its start, each within its own bound."""
        self._notifier.stopping()
        _log.info("stopping; what comes meanwhile waits in the trainer")
        self._closing.close()
        self._alarm.close()

    def reload(self) -> str | None:
        """Reload the definitions; from any thread but the main one. Returns what is wrong with them."""
        request = ReloadRequest()
        self._reloads.append(request)
        self._alarm.ring()
        if not request.done.wait(RELOAD_TIMEOUT_S):
            return f"no answer within {RELOAD_TIMEOUT_S:g} s; look at the log"
        return request.problem

    def _start(self) -> None:
        self._receiver.start()
        self._pipeline.open(self._window_s())
        deadline_s = time.monotonic() + CATCH_UP_S
        self._pipeline.turn(CATCH_UP_S / 4)
        self._collectors.start()  # only now, because from here on the pipeline knows the trainers' processes
        while not self._pipeline.is_caught_up and time.monotonic() < deadline_s and not self._should_stop:
            self._pipeline.turn(CATCH_UP_S / 4)
        deadline_s = time.monotonic() + FIRST_READINGS_S
        while len(self._collectors.latest()) < NUM_COLLECTORS and time.monotonic() < deadline_s:
            self._alarm.sleep(FIRST_READINGS_S / 20)
        self._publication.publish(self._sink, self._collectors.latest())
        self._http.start()
        self._is_ready = True
        self._notifier.ready(self._publication.summary())
        _log.info("listening on %s, looking for trainers in %s", self._url(), self._runtime_dir)
        _log.info("definitions: %s; W&B: %s", self._definitions.current.file, self._outlet.summary())
        if not self._pipeline.trainers:
            _log.info("no trainer yet; it is found as soon as it starts with the same DFLASH_RUNTIME_DIR")

    def _turn(self) -> None:
        """Once around: take in, pass on, show."""
        requests = self._reload_if_due()
        readings = self._collectors.latest()
        self._pipeline.add_readings(readings)
        self._pipeline.turn(self._config.interval_s)
        if self._outlet.tick(time.monotonic()):
            self._pipeline.open(self._window_s())
        self._publication.publish(self._sink, readings)
        for request in requests:  # only now: who asked may count on seeing the outcome
            request.done.set()
        self._trim()
        if not self._receiver.is_alive and not self._should_stop:
            if (failure := self._receiver.failure) is not None:
                raise failure
            raise SidecarError("the receiver stopped, see the traceback above; start again")
        self._notifier.alive(self._publication.summary())

    def _reload_if_due(self) -> list[ReloadRequest]:
        requests = [self._reloads.popleft() for _ in range(len(self._reloads))]
        if requests or self._definitions.has_changed():
            self._notifier.reloading()
            problem = self._definitions.reload()
            if self._window_s() > self._pipeline.store.window_s:
                self._pipeline.open(self._window_s())
            self._notifier.ready(self._publication.summary())
            for request in requests:
                request.problem = problem
        return requests

    def _trim(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_trim_s:
            bounds = self._config.journal
            more = self._journal.trim(time.time() - bounds.max_age_s, bounds.max_bytes)
            more |= self._outlet.trim(bounds.max_age_s, bounds.max_bytes)
            self._next_trim_s = now_s if more else now_s + TRIM_INTERVAL_S

    def _window_s(self) -> float:
        return self._definitions.current.history_s + HISTORY_MARGIN_S

    def _row_values(self, at: str, time_s: float) -> Mapping[str, float]:
        definitions = self._definitions.current
        return definitions.evaluate(self._pipeline.store, time_s, "step" if at == "step" else "tick").wandb

    def _url(self) -> str:
        host = self._config.address[0]
        return f"http://{f'[{host}]' if ':' in host else host}:{self._http.port}"

    def _file_failure(self, error: sqlite3.Error) -> SidecarError:
        if is_corruption(error):
            mark_damaged(self._journal_path)
            return SidecarError(f"{self._journal_path} is damaged ({error}); start again to move it aside")
        return SidecarError(f"cannot use the files in {self._journal_path.parent} ({error}); start again")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals set flags: the first to stop is heeded at once, a second one ends the process on the spot."""

        def stop(number: int, _frame: FrameType | None) -> None:
            if self._should_stop:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self._should_stop = True
            self._alarm.ring()

        def reload(_number: int, _frame: FrameType | None) -> None:
            self._reloads.append(ReloadRequest())
            self._alarm.ring()

        handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
