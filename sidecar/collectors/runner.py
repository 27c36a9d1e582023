"""Runs every collector in a thread of its own, times it, and catches and counts whatever goes wrong.

A call into a driver may hang for ever and cannot be interrupted. So nobody waits for it: the thread stays in the call,
the reading is reported as failed once the deadline is over, and when the call returns after all the next reading is
as good as any. The threads are daemons, so a hung one does not keep the process from ending either.

Readings begin at whole multiples of the interval, so those of all threads at once: what the second one runs through,
the first has just brought into the CPU's caches. A thread that wakes up alone takes twice the time.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from sidecar.collectors.reading import Collector, Reading
from sidecar.samples import ExportedFamily

_LOG = logging.getLogger(__name__)


class CollectorRunner:
    """Read collectors periodically and hand out their newest readings.

    Args:
        collectors: each gets one thread.
        interval_s: readings begin at whole multiples of it.
        deadline_s: a reading that takes longer counts as failed.
        slow: intervals of those that are read less often, by name.
    """

    def __init__(
        self,
        collectors: Sequence[Collector],
        interval_s: float,
        deadline_s: float,
        slow: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._workers = [Worker(each, slow.get(each.name, interval_s), deadline_s) for each in collectors]

    def start(self) -> None:
        """Start all threads."""
        for worker in self._workers:
            worker.start()

    @property
    def has_read(self) -> bool:
        """Whether each collector has a reading."""
        return all(worker.latest() is not None for worker in self._workers)

    def latest(self) -> list[Reading]:
        """The newest reading of each collector that has finished or overrun one. Never blocks, safe from any thread."""
        return [reading for worker in self._workers if (reading := worker.latest()) is not None]

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop reading; waits for calls in progress, all together at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.stopping.set()
        for worker in self._workers:
            worker.join_until(deadline_s)


class FailureLog:
    """Logs a change of a collector from working to failing and back, not every failure. One thread only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_failing = False

    def tell(self, error: str) -> None:
        """Say what is wrong now; nothing when it works."""
        if error and not self._is_failing:
            _LOG.warning("collector %s: %s", self._name, error)
        elif self._is_failing and not error:
            _LOG.info("collector %s works again", self._name)
        self._is_failing = bool(error)


class Worker(threading.Thread):
    """Reads one collector periodically.

    Args:
        collector: only this thread calls it, but for `unread`.
        interval_s: readings begin at whole multiples of it.
        deadline_s: a reading that takes longer counts as failed.
        source: which one it is, of a collector that has several.
    """

    def __init__(self, collector: Collector, interval_s: float, deadline_s: float, source: str = "") -> None:
        super().__init__(name=f"collect-{collector.name}-{source}".rstrip("-"), daemon=True)
        self._source = source
        self._unread: Callable[[], Sequence[ExportedFamily]] = getattr(collector, "unread", tuple)
        self._collector = collector
        self._interval_s = interval_s
        self._deadline_s = deadline_s
        self._started_s: float | None = None
        self._reading: Reading | None = None
        self._failures = FailureLog(f"{collector.name} {source}".strip())
        self.stopping = threading.Event()

    def run(self) -> None:
        """Read until told to stop."""
        while not self.stopping.is_set():
            self._started_s = started_s = time.monotonic()
            self._reading = self._read(started_s)
            self._started_s = None
            next_s = round(started_s / self._interval_s + 1) * self._interval_s
            self.stopping.wait(max(next_s - time.monotonic(), 0.0))

    def latest(self) -> Reading | None:
        """The finished reading, or a failed one when the call in progress is over its deadline; logs a change."""
        started_s, reading = self._started_s, self._reading
        if started_s is not None and (elapsed_s := time.monotonic() - started_s) > self._deadline_s:
            error = f"no answer within {self._deadline_s:g} s"
            reading = self._reading_of(time.time(), elapsed_s, error=error)
        if reading is not None:
            self._failures.tell(reading.error)
        return reading

    def join_until(self, deadline_s: float) -> None:
        """Wait for the reading in progress until a monotonic time."""
        if self.is_alive():
            self.join(max(deadline_s - time.monotonic(), 0.0))

    def _read(self, started_s: float) -> Reading:
        time_s = time.time()
        try:
            families, error = tuple(self._collector.collect()), ""
        except Exception as failure:  # noqa: BLE001 - the one place where a collector may fail in any way it likes
            families, error = (), f"{type(failure).__name__}: {failure}"
        duration_s = time.monotonic() - started_s
        if duration_s > self._deadline_s:
            error = f"took {duration_s:.1f} s, at most {self._deadline_s:g} s are allowed"
        return self._reading_of(time_s, duration_s, families, error)

    def _reading_of(
        self, time_s: float, duration_s: float, families: tuple[ExportedFamily, ...] = (), error: str = ""
    ) -> Reading:
        """What was read, or what is to be shown of a failure instead."""
        return Reading(
            collector=self._collector.name,
            source=self._source,
            success=not error,
            time_s=time_s,
            duration_s=duration_s,
            families=tuple(self._unread()) if error else families,
            error=error,
        )
