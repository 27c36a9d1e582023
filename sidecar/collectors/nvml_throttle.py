"""Why the driver does not clock higher: flags as they are now, and the time under each.

The driver counts that time too, but under field ids that moved between its generations and in a unit that sources
disagree on by a factor of 1,000. So it is counted here: the time between two readings belongs to a reason in full when
both show it, in half when one does. What lies under no two readings in a row is not counted.
"""

import time
from collections.abc import Iterator

import pynvml

from sidecar.collectors.nvml_device import Device
from sidecar.collectors.nvml_queries import Query
from sidecar.samples import Point

REASONS = {
    "gpu_idle": pynvml.nvmlClocksEventReasonGpuIdle,
    "application_clocks": pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
    "software_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "hardware_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "sync_boost": pynvml.nvmlClocksEventReasonSyncBoost,
    "software_thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hardware_thermal": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "display_clocks": pynvml.nvmlClocksEventReasonDisplayClockSetting,
}
MAX_GAP_S = 30.0


class Throttling:
    """Counts for one GPU, over losing it and finding it again."""

    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None
        self._total_s = dict.fromkeys(REASONS, 0.0)
        self.query = Query(("dflash_gpu_throttled", "dflash_gpu_throttled_seconds_total"), self._read)

    def _read(self, device: Device) -> Iterator[Point]:
        before, self._before = self._before, None
        mask = _reasons(device)
        now_s = time.monotonic()
        self._before = (now_s, mask)
        elapsed_s = now_s - before[0] if before else 0.0
        counts = before is not None and elapsed_s <= MAX_GAP_S
        for reason, bit in REASONS.items():
            is_set = bool(mask & bit)
            if counts and before is not None:
                self._total_s[reason] += elapsed_s * (is_set + bool(before[1] & bit)) / 2
            labels = device.labels_with("reason", reason)
            yield "dflash_gpu_throttled", labels, float(is_set)
            yield "dflash_gpu_throttled_seconds_total", labels, self._total_s[reason]


def _reasons(device: Device) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(device.handle))
    except pynvml.NVMLError_FunctionNotFound:  # its name in older drivers
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device.handle))
