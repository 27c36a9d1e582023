"""A stand-in for `torch.cuda` on machines without it: devices and allocators that a test writes.

The statistics have every key that torch's own documentation of `memory_stats` promises, and no other, so whoever asks
for a key that torch does not have fails here as well.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import product

import torch

SIZES = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")


def documented_keys() -> set[str]:
    """The keys of `torch.cuda.memory_stats`, as the installed torch documents them."""
    keys: set[str] = set()
    for text in re.findall(r'^\s*- ``"(.*?)"``', torch.cuda.memory_stats.__doc__ or "", re.MULTILINE):
        parts = [part.strip("{}").split(",") for part in text.split(".")]
        keys |= {".".join(choice) for choice in product(*parts)}
    return keys


@dataclass(frozen=True)
class Properties:
    """What is read of a device."""

    name: str
    uuid: str
    """Without a prefix, as torch gives it."""


class CudaModule:
    """Devices in the order that their process sees them, each with an allocator."""

    def __init__(self, *devices: Properties) -> None:
        self._devices = devices
        self.statistics = {i: dict.fromkeys(documented_keys(), 0) for i in range(len(devices))}
        self.num_readings: defaultdict[int, int] = defaultdict(int)

    def get_device_properties(self, device: torch.device) -> Properties:
        """Describe a device."""
        return self._devices[device.index]

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        """A copy of what the allocator knows."""
        self.num_readings[device.index] += 1
        return dict(self.statistics[device.index])

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Make the current values the peaks."""
        statistics = self.statistics[device.index]
        statistics |= {key: statistics[key.replace(".peak", ".current")] for key in statistics if ".peak" in key}

    def allocate(self, index: int, num_bytes: int) -> None:
        """Allocate so many bytes, or free them when negative; an allocator never gives back what it reserved."""
        statistics = self.statistics[index]
        for size in ("allocated_bytes", "active_bytes"):
            statistics[f"{size}.all.current"] += num_bytes
        reserved = max(statistics["reserved_bytes.all.current"], statistics["allocated_bytes.all.current"])
        statistics["num_device_alloc"] += reserved > statistics["reserved_bytes.all.current"]
        statistics["reserved_bytes.all.current"] = reserved
        for size in SIZES:
            peak = f"{size}.all.peak"
            statistics[peak] = max(statistics[peak], statistics[f"{size}.all.current"])

    def run_out_of_memory(self, index: int) -> None:
        """Fail as the allocator does: flush, try again, give up."""
        self.statistics[index]["num_alloc_retries"] += 1
        self.statistics[index]["num_ooms"] += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
