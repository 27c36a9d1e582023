"""Runs every collector in a thread of its own, times it, and catches and counts whatever goes wrong.

A call into a driver may hang for ever and cannot be interrupted. So nobody waits for it: the thread stays in the call,
the reading is reported as failed once the deadline is over, and when the call returns after all the next reading is
as good as any. The threads are daemons, so a hung one does not keep the process from ending either.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sidecar.collectors.reading import Collector, Reading

_LOG = logging.getLogger(__name__)


class CollectorRunner:
    """Read collectors periodically and hand out their newest readings.

    Args:
        collectors: each gets one thread.
        interval_s: time from the start of one reading to the start of the next.
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
        self._workers = [_Worker(each, slow.get(each.name, interval_s), deadline_s) for each in collectors]

    def start(self) -> None:
        """Start all threads."""
        for worker in self._workers:
            worker.start()

    def latest(self) -> list[Reading]:
        """The newest reading of each collector that has finished or overrun one. Never blocks, safe from any thread."""
        return [reading for worker in self._workers if (reading := worker.latest()) is not None]

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop reading; waits for calls in progress, all together at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.stopping.set()
        for worker in self._workers:
            if worker.is_alive():
                worker.join(max(deadline_s - time.monotonic(), 0.0))


class _Worker(threading.Thread):
    def __init__(self, collector: Collector, interval_s: float, deadline_s: float) -> None:
        super().__init__(name=f"collect-{collector.name}", daemon=True)
        self._collector = collector
        self._interval_s = interval_s
        self._deadline_s = deadline_s
        self._started_s: float | None = None
        self._reading: Reading | None = None
        self._failing = False
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            self._started_s = started_s = time.monotonic()
            self._reading = reading = self._read(started_s)
            self._started_s = None
            self._report(reading)
            self.stopping.wait(max(started_s + self._interval_s - time.monotonic(), 0.0))

    def latest(self) -> Reading | None:
        """The finished reading, or a failed one when the call in progress is over its deadline."""
        started_s = self._started_s
        if started_s is None or (elapsed_s := time.monotonic() - started_s) <= self._deadline_s:
            return self._reading
        return Reading(
            collector=self._collector.name,
            success=False,
            time_s=time.time(),
            duration_s=elapsed_s,
            error=f"no answer within {self._deadline_s:g} s",
        )

    def _read(self, started_s: float) -> Reading:
        time_s = time.time()
        try:
            families, error = tuple(self._collector.collect()), ""
        except Exception as failure:  # noqa: BLE001 - the one place where a collector may fail in any way it likes
            families, error = (), f"{type(failure).__name__}: {failure}"
        duration_s = time.monotonic() - started_s
        if duration_s > self._deadline_s:
            families, error = (), f"took {duration_s:.1f} s, at most {self._deadline_s:g} s are allowed"
        return Reading(
            collector=self._collector.name,
            success=not error,
            time_s=time_s,
            duration_s=duration_s,
            families=families,
            error=error,
        )

    def _report(self, reading: Reading) -> None:
        """Log a change from working to failing and back, not every failure."""
        if not reading.success and not self._failing:
            _LOG.warning("collector %s: %s", reading.collector, reading.error)
        elif reading.success and self._failing:
            _LOG.info("collector %s works again", reading.collector)
        self._failing = not reading.success
