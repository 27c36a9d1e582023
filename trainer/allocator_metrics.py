"""What the CUDA caching allocator says about itself, mirrored into cells by the telemetry thread.

Reading takes the allocator's lock, which every allocation takes too. So it is never done on the step path, and only
every few seconds (`telemetry.allocator_interval_s`) for each device.

A peak is the largest value since the reading before. torch keeps one peak per device and process, so it has to be reset
here after each reading, and `torch.cuda.max_memory_allocated()` called elsewhere in this process sees no more than the
last interval; nobody else in the trainer asks. Should something be allocated and freed again between reading and reset,
a few microseconds apart, it is missed.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from shared.cells import Cells

_SIZES = ("allocated", "reserved", "active", "inactive_split")
_COUNTERS = {
    "dflash_cuda_allocator_alloc_retries_total": "num_alloc_retries",
    "dflash_cuda_allocator_ooms_total": "num_ooms",
    "dflash_cuda_allocator_device_allocs_total": "num_device_alloc",
    "dflash_cuda_allocator_device_frees_total": "num_device_free",
}


class AllocatorModule(Protocol):
    """The part of `torch.cuda` that knows the allocator."""

    def memory_stats(self, device: torch.device, /) -> dict[str, Any]:
        """All statistics of one device; empty before the first use of CUDA."""

    def reset_peak_memory_stats(self, device: torch.device, /) -> None:
        """Make the current values the peaks."""


class AllocatorMetrics:
    """Mirror the allocator's statistics of every GPU of the run; nothing at all on a CPU.

    Args:
        cells: where the series are declared.
        devices: that the run works on.
        cuda: `torch.cuda`.
        interval_s: between two readings.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        cells: Cells,
        devices: Iterable[torch.device],
        cuda: AllocatorModule,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cuda = cuda
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = float("-inf")
        self._devices = sorted({device for device in devices if device.type == "cuda"}, key=str)
        self._gauges = [
            (device, f"{size}_bytes.all.{kind}", cells.gauge(f"dflash_cuda_allocator_{name}_bytes", device=str(device)))
            for device in self._devices
            for size in _SIZES
            for kind, name in (("current", size), ("peak", f"{size}_peak"))
        ]
        self._counters = [
            (device, key, cells.counter(name, device=str(device)))
            for device in self._devices
            for name, key in _COUNTERS.items()
        ]

    def pull(self) -> None:
        """Read every device, if it is time to. On the telemetry thread."""
        now_s = self._clock()
        if not self._devices or now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        statistics = {}
        for device in self._devices:
            statistics[device] = self._cuda.memory_stats(device)
            if statistics[device]:
                self._cuda.reset_peak_memory_stats(device)
        for device, key, gauge in self._gauges:
            gauge.set(statistics[device].get(key, 0))
        for device, key, counter in self._counters:
            counter.mirror(statistics[device].get(key, 0))

    def expire(self) -> None:
        """Read at the next pull whatever the interval: the run ends, perhaps for lack of memory. From any thread."""
        self._next_s = float("-inf")
