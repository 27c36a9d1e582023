"""Metrics that the telemetry thread pulls once per snapshot, so that nobody on the step path has to push them.

All cells declared here belong to the telemetry thread. The allocator has a module of its own, `allocator_metrics`.
"""

import time
from collections.abc import Callable

from shared.cells import Cells
from shared.ring import Ring
from trainer.hidden_queue import QueueStatistics


class QueueMetrics:
    """Mirror a queue's statistics into cells."""

    def __init__(self, cells: Cells, queue: str, read: Callable[[], QueueStatistics]) -> None:
        self._read = read
        self._gauges = {
            field: cells.gauge(name, queue=queue)
            for field, name in (
                ("depth", "dflash_queue_depth"),
                ("capacity", "dflash_queue_capacity"),
                ("num_bytes", "dflash_queue_bytes"),
                ("capacity_bytes", "dflash_queue_capacity_bytes"),
                ("oldest_age_s", "dflash_queue_age_seconds"),
            )
        }
        self._counters = {
            "puts_total": cells.counter("dflash_queue_puts_total", queue=queue),
            "gets_total": cells.counter("dflash_queue_gets_total", queue=queue),
            "put_blocked_s": cells.counter("dflash_queue_blocked_seconds_total", queue=queue, side="put"),
            "get_blocked_s": cells.counter("dflash_queue_blocked_seconds_total", queue=queue, side="get"),
        }

    def pull(self) -> None:
        """Read once and copy every figure."""
        statistics = self._read()
        for field, gauge in self._gauges.items():
            gauge.set(getattr(statistics, field))
        for field, counter in self._counters.items():
            counter.mirror(getattr(statistics, field))


class RingMetrics:
    """Mirror the replay ring and the telemetry thread's own cost into cells."""

    def __init__(self, cells: Cells) -> None:
        self._records = cells.gauge("dflash_telemetry_ring_records")
        self._bytes = cells.gauge("dflash_telemetry_ring_bytes")
        self._cpu = cells.counter("dflash_telemetry_cpu_seconds_total")

    def pull(self, ring: Ring) -> None:
        """Copy the ring's figures; on the telemetry thread, whose CPU time is read."""
        self._records.set(len(ring))
        self._bytes.set(ring.num_bytes)
        self._cpu.mirror(time.thread_time())
