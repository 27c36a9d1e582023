"""The life of the sidecar: build everything, run the main loop, close in reverse order.

The main thread owns the pipeline, the definitions and the spool. Others only hand it something: the receiver through
the journal, collectors through their newest reading, HTTP and signals through a flag and the alarm. HTTP begins to
answer once the past that the definitions need has been read again, so that no scrape sees less than the one before a
restart.
"""

import gc
import logging
import signal
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import msgspec

from shared.curve import CurveClient
from sidecar.catalogue import stored_catalogue
from sidecar.collectors.machine import Machine
from sidecar.collectors.reading import Reading
from sidecar.config import SidecarConfig
from sidecar.database import DatabaseError, is_corruption, mark_damaged
from sidecar.exposition import merged
from sidecar.gpu_owners import Owner
from sidecar.http import HttpServer
from sidecar.live_definitions import SETTLE_S, LiveDefinitions
from sidecar.reloads import Reloads
from sidecar.sinks.prometheus import PrometheusSink
from sidecar.state_dir import StateDir
from sidecar.station import JOURNAL_NAME, Surroundings, has_room, live_endpoints, open_station
from sidecar.status import StatusDocument
from sidecar.stored import StoredSession
from sidecar.systemd import Notifier
from sidecar.wake import Alarm

CATCH_UP_S = 2.0
"""How long the first scrape may wait for the past to be read again."""
FIRST_READINGS_S = 0.2
"""How long it may wait for host, process and GPU."""
POLL_S = 0.01
GARBAGE_OBJECTS = 20_000
"""So many objects more than before begin a search for cycles; a turn makes thousands, and none of them in a cycle."""
TRIM_INTERVAL_S = 60.0
MIN_PROBE_PAUSE_S = 5.0
MAX_PROBE_PAUSE_S = 60.0
"""While the journal is in memory, the disk is tried again after so long."""
YOUNG_S = 60.0
"""A journal that fails again within this time is left alone for longer."""
_log = logging.getLogger(__name__)


class SidecarError(ValueError):
    """The sidecar cannot go on; the message is meant for the user."""


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
        self._state_dir = state_dir
        self._alarm = Alarm()
        self._should_stop = False
        self._is_ready = False
        self._reloads = Reloads()
        self._next_trim_s = self._next_probe_s = 0.0
        self._probe_pause_s = MIN_PROBE_PAUSE_S
        self._failed_s = float("-inf")
        self._notifier = Notifier(environ)
        self._sink = PrometheusSink(merged)
        with ExitStack() as stack:
            self._http = HttpServer(
                listen=config.address,
                sink=self._sink,
                status=lambda: msgspec.to_builtins(self._document),
                reload=self.reload,
                ready=lambda: self._is_ready,
                http=config.http,
            )
            stack.callback(self._http.close)
            self._definitions = self._live_definitions(state_dir.path)
            self._around = Surroundings(
                config=config,
                state_dir=state_dir.path,
                runtime_dir=runtime_dir,
                environ=environ,
                definitions=self._definitions,
                url=self._http.url,
                curve=CurveClient.load(Path(config.remote.keys)) if config.remote.endpoints else None,
            )
            self._station = open_station(self._around)
            stack.callback(self._close_station)
            self._machine = Machine(config.collectors, state_dir.path, self._trainers, self._gpu_owners)
            stack.callback(self._machine.close)
            state_dir.announce(self._http.url)
            self._closing = stack.pop_all()
        self._document: StatusDocument

    def run(self) -> None:
        """Live until told to stop; raises SidecarError when that is not possible."""
        with self._signals():
            self._start()
            gc.freeze()  # what lives from here on till the end need not be looked through again and again
            gc.set_threshold(GARBAGE_OBJECTS)
            while not self._should_stop:
                started_s = time.monotonic()
                try:
                    self._turn()
                except (sqlite3.Error, DatabaseError) as error:
                    self._replace_station(error)
                self._alarm.sleep(started_s + self._pause_s() - time.monotonic())

    def close(self) -> None:
        """Stop everything in reverse order of its start, each within its own bound."""
        self._notifier.stopping()
        _log.info("stopping; what comes meanwhile waits in the trainer")
        self._closing.close()
        self._alarm.close()

    def reload(self) -> str | None:
        """Reload the definitions; from any thread but the main one. Returns what is wrong with them."""
        request = self._reloads.ask()
        self._alarm.ring()
        return request.wait()

    def _start(self) -> None:
        # A trainer that the journal does not know yet (it may be a new one) is to be on the first page too.
        self._open_up(live_endpoints(self._around.runtime_dir) - self._station.endpoints())
        self._machine.start()  # only now, because from here on the pipeline knows the trainers' processes
        deadline_s = time.monotonic() + FIRST_READINGS_S
        while not self._machine.has_read and time.monotonic() < deadline_s:
            self._alarm.sleep(POLL_S)
        self._publish(self._machine.latest())
        self._http.start()
        self._is_ready = True
        self._notifier.ready(self._station.publication.summary())
        _log.info("listening on %s, looking for trainers in %s", self._http.url, self._around.runtime_dir)
        _log.info("definitions: %s; W&B: %s", self._definitions.current.file, self._station.outlet.summary())
        if not self._station.pipeline.trainers:
            _log.info("no trainer yet; it is found as soon as it starts with the same DFLASH_RUNTIME_DIR")

    def _open_up(self, expected: set[str]) -> None:
        """Start the station and wait a little until it can show the past and everything from these endpoints."""
        deadline_s = time.monotonic() + CATCH_UP_S
        try:
            self._station.start()
            self._station.turn(CATCH_UP_S / 4)
            while not (self._station.pipeline.shows(expected) or time.monotonic() > deadline_s or self._should_stop):
                self._alarm.sleep(POLL_S)
                self._station.turn(CATCH_UP_S / 4)
        except (sqlite3.Error, DatabaseError) as error:
            self._change_station(error)
            self._open_up(expected)  # not for ever: what is damaged twice is left alone, and memory does not fail

    def _turn(self) -> None:
        """Once around: take in, pass on, show."""
        self._reload_if_due()
        if self._station.journal.is_on_disk and not (self._state_dir.is_held and self._station.is_in_place):
            raise DatabaseError("it was removed while in use")
        readings = self._machine.latest()
        self._station.pipeline.add_readings(readings)
        self._station.turn(self._config.interval_s)
        self._station.upload()
        self._publish(readings)
        if self._station.publication.shows_current:
            self._reloads.answer()
        self._trim()
        self._return_to_disk()
        receiver = self._station.receiver
        if not receiver.is_alive and not self._should_stop:
            if (failure := receiver.failure) is not None:
                raise failure
            raise SidecarError("the receiver stopped, see the traceback above; start again")
        self._notifier.alive(self._station.publication.summary())

    def _publish(self, readings: Sequence[Reading]) -> None:
        self._station.publication.publish(self._sink, readings)
        document = self._station.publication.document
        self._document = msgspec.structs.replace(document, backfill=self._station.backfills.status)

    def _replace_station(self, error: sqlite3.Error | DatabaseError | None) -> None:
        """Go on with another station, after an error of this one or to return to the disk."""
        feeds = self._station.pipeline.feeds.values()
        expected = {feed.stored.endpoint for feed in feeds if feed.stored.ended_s is None}
        self._change_station(error)
        self._open_up(expected)
        self._publish(self._machine.latest())

    def _change_station(self, error: sqlite3.Error | DatabaseError | None) -> None:
        """Close the station and make another one: on the file, moved aside if it is damaged, else in memory."""
        path, in_memory, now_s = self._around.journal_path, "", time.monotonic()
        if error is not None:
            failed_again = now_s < self._failed_s + YOUNG_S
            self._failed_s = now_s
            self._probe_pause_s = min(2 * self._probe_pause_s, MAX_PROBE_PAUSE_S) if failed_again else MIN_PROBE_PAUSE_S
            if is_corruption(error):
                mark_damaged(path)
            if failed_again or not is_corruption(error):
                in_memory = f"{path}: {error}"
        self._station.close()
        self._station = open_station(self._around, in_memory)
        if self._station.journal.is_on_disk:
            _log.info("writing to %s, fetching what it lacks", path)
        self._next_probe_s = time.monotonic() + self._probe_pause_s

    def _trainers(self) -> Sequence[StoredSession]:
        return self._station.pipeline.trainers

    def _gpu_owners(self) -> Mapping[str, Owner]:
        return self._station.pipeline.gpu_owners

    def _close_station(self) -> None:
        self._station.close()

    def _return_to_disk(self) -> None:
        now_s = time.monotonic()
        if not self._station.journal.is_on_disk and now_s >= self._next_probe_s:
            self._next_probe_s = now_s + self._probe_pause_s
            if self._state_dir.take_again() and has_room(self._around.state_dir):
                self._state_dir.announce(self._http.url)
                self._replace_station(None)

    def _reload_if_due(self) -> None:
        """Reload when asked to, or when the file has changed."""
        is_due = self._reloads.is_asked and (self._reloads.is_late or self._definitions.is_at_rest())
        if not is_due and not self._definitions.has_changed():
            return
        num_asking = self._reloads.take()
        self._notifier.reloading()
        self._reloads.decide(num_asking, self._definitions.reload(self._station.publication.try_out))
        self._station.widen()
        self._notifier.ready(self._station.publication.summary())

    def _pause_s(self) -> float:
        """Time from the beginning of one turn to that of the next."""
        return min(self._config.interval_s, SETTLE_S / 4) if self._reloads.is_asked else self._config.interval_s

    def _live_definitions(self, state_dir: Path) -> LiveDefinitions:
        chosen = Path(self._config.definitions) if self._config.definitions else None
        return LiveDefinitions(
            chosen, state_dir, lambda: stored_catalogue(state_dir / JOURNAL_NAME), self._count_reload
        )

    def _count_reload(self, outcome: str) -> None:
        with suppress(sqlite3.Error):  # a journal that cannot be written shows in the turn that follows
            self._station.journal.count("reloads", outcome)

    def _trim(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_trim_s:
            self._next_trim_s = now_s if self._station.trim() else now_s + TRIM_INTERVAL_S

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
            self._reloads.ask()
            self._alarm.ring()

        handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
