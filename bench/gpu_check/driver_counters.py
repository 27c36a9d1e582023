"""The driver's own counters of throttled time, whose unit sources disagree on by a factor of 1,000.

The sidecar does not use them for that reason and counts by itself. Here they are read raw beside its count, so that the
unit on this driver is known.
"""

from typing import NamedTuple

import pynvml

POLICIES = {
    "software_power_cap": pynvml.NVML_PERF_POLICY_POWER,
    "software_thermal": pynvml.NVML_PERF_POLICY_THERMAL,
    "sync_boost": pynvml.NVML_PERF_POLICY_SYNC_BOOST,
}
"""Reasons of the sidecar and the driver's name for what is close to them."""


class Violation(NamedTuple):
    """Raw counters of one policy: documented as nanoseconds, and microseconds for the reference."""

    raw: int
    reference_raw: int


class DriverCounters:
    """Reads them by UUID; the driver is initialised by whoever makes this, and once more here."""

    def __init__(self) -> None:
        pynvml.nvmlInit()

    def read(self, uuid: str) -> dict[str, Violation]:
        """The counters of one GPU, those that it has."""
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        found = {}
        for reason, policy in POLICIES.items():
            try:
                status = pynvml.nvmlDeviceGetViolationStatus(handle, policy)
            except pynvml.NVMLError:
                continue
            found[reason] = Violation(int(status.violationTime), int(status.referenceTime))
        return found

    def close(self) -> None:
        """Let go of the driver."""
        pynvml.nvmlShutdown()
