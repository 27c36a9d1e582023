"""Metrics that the telemetry thread pulls once per snapshot, so that nobody on the step path has to push them.

All cells declared here belong to the telemetry thread. Reading the allocator's statistics takes the allocator's lock,
so it is done only every few seconds.
"""

import time
from collections.abc import Callable

import torch

from shared.cells import Cells
from shared.ring import Ring
from trainer.hidden_queue import QueueStatistics

ALLOCATOR_INTERVAL_S = 5.0
_ALLOCATOR_GAUGES = {
    "dflash_cuda_allocator_allocated_bytes": "allocated_bytes.all.current",
    "dflash_cuda_allocator_reserved_bytes": "reserved_bytes.all.current",
    "dflash_cuda_allocator_active_bytes": "active_bytes.all.current",
    "dflash_cuda_allocator_inactive_split_bytes": "inactive_split_bytes.all.current",
}
_ALLOCATOR_COUNTERS = {
    "dflash_cuda_allocator_alloc_retries_total": "num_alloc_retries",
    "dflash_cuda_allocator_ooms_total": "num_ooms",
}


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


class AllocatorMetrics:
    """Mirror the CUDA caching allocator's statistics into cells; nothing at all on a CPU."""

    def __init__(self, cells: Cells, devices: set[torch.device]) -> None:
        self._devices = {device: str(device.index) for device in devices if device.type == "cuda"}
        self._gauges = {
            (device, key): cells.gauge(name, device=label)
            for device, label in self._devices.items()
            for name, key in _ALLOCATOR_GAUGES.items()
        }
        self._counters = {
            (device, key): cells.counter(name, device=label)
            for device, label in self._devices.items()
            for name, key in _ALLOCATOR_COUNTERS.items()
        }
        self._next_s = 0.0

    def pull(self) -> None:
        """Read every device, if it is time to."""
        if not self._devices or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + ALLOCATOR_INTERVAL_S
        statistics = {device: torch.cuda.memory_stats(device) for device in self._devices}
        for (device, key), gauge in self._gauges.items():
            gauge.set(statistics[device].get(key, 0))
        for (device, key), counter in self._counters.items():
            counter.mirror(statistics[device].get(key, 0))


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
