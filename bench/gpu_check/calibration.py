"""Units against wall time: energy against power, throttled seconds against flags that never fell, driver counters.

All is read in one window of steady load, after the first two seconds, because a reading of power is an average over
the second before it.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from bench.gpu_check.driver_counters import DriverCounters, Violation
from bench.gpu_check.gpu_readings import GpuReadings, Point
from bench.gpu_check.outcome import CheckFailedError, CheckSkippedError, Figures
from bench.workplace import Workplace
from sidecar.collectors.nvml_throttle import REASONS

SETTLE_S = 2.0
START_TIMEOUT_S = 30.0
ENERGY_RATIO = (0.8, 1.25)
"""Counter and power meter of one GPU differ by some percent; a wrong unit differs by a thousand."""
THROTTLE_RATIO = (0.9, 1.1)
UNIT_RATIO = (0.5, 2.0)
MIN_THROTTLED_S = 1.0
BUSY_RATIO = 0.5
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class Window(NamedTuple):
    """A stretch of steady load: when, and the driver's counters at both ends by UUID."""

    start_s: float
    end_s: float
    before: dict[str, dict[str, Violation]]
    after: dict[str, dict[str, Violation]]

    def of(self, points: Sequence[Point]) -> list[Point]:
        """The points that lie in it."""
        return [point for point in points if self.start_s <= point.time_s <= self.end_s]


class Calibration:
    """The load, what was read meanwhile, and the checks of it.

    Args:
        readings: entered by the caller.
        devices: to be kept busy, as torch names them.
        uuids: of these devices.
        seconds: of the window.
    """

    def __init__(self, readings: GpuReadings, devices: Sequence[str], uuids: Sequence[str], seconds: float) -> None:
        self._readings = readings
        self._devices = devices
        self._uuids = uuids
        self._seconds = seconds
        self._window: Window | None = None

    def check_load(self, figures: Figures) -> str:
        """Keep the GPUs busy for a while; the driver must see it on each GPU that torch has."""
        with Workplace() as place:
            total_s = self._seconds + SETTLE_S + 1.0
            load = place.popen(("-m", "bench.gpu_check.load", str(total_s), *self._devices))
            place.wait(lambda: "busy" in place.output(load), load, "the load to begin", START_TIMEOUT_S)
            self._readings.watch(SETTLE_S)
            self._window = self._observe()
        whole = [uuid for uuid in self._uuids if not uuid.startswith("MIG-")]  # of parts the driver does not say it
        seen = {uuid: self._mean(uuid, "utilization_ratio") for uuid in whole}
        figures["window_s"] = self._window.end_s - self._window.start_s
        figures |= {f"utilization_ratio {uuid}": value for uuid, value in seen.items()}
        figures |= {f"power_watts {uuid}": self._mean(uuid, "power_watts") for uuid in whole}
        idle = [uuid for uuid, value in seen.items() if value is None or value < BUSY_RATIO]
        if idle:
            raise CheckFailedError(f"busy for torch, but not seen so by the driver: {', '.join(idle)}")
        return f"{len(self._devices)} devices busy for {figures['window_s']:.1f} s"

    def check_energy(self, figures: Figures) -> str:
        """Joules of the counter against the integral of the power over the same wall time."""
        ratios = []
        for uuid in self._readings.uuids():
            energy, power = self._in_window(uuid, "energy_joules_total"), self._in_window(uuid, "power_watts")
            steps = [after for before, after in pairwise(energy) if after.value > before.value]
            if len(steps) > 1:  # from step to step of the counter, which advances every 100 ms at most
                joules = steps[-1].value - steps[0].value
                integral = _integral([p for p in power if steps[0].time_s <= p.time_s <= steps[-1].time_s])
                ratios.append(joules / integral if integral else 0.0)
                figures |= {f"energy_joules {uuid}": joules, f"power_integral_joules {uuid}": integral}
                figures[f"energy_ratio {uuid}"] = ratios[-1]
        if not ratios:
            raise CheckSkippedError("no GPU here counts its energy")
        _expect(ratios, ENERGY_RATIO, "joules counted over joules drawn")
        return f"joules counted over joules drawn: {_span(ratios)}"

    def check_throttled_seconds(self, figures: Figures) -> str:
        """A reason that was given all the time must have gained a second per second."""
        ratios = []
        for uuid, reason in self._reasons():
            flags = self._in_window(uuid, "throttled", reason=reason)
            total = self._in_window(uuid, "throttled_seconds_total", reason=reason)
            if len(total) > 1 and flags and all(flag.value for flag in flags):
                ratios.append((total[-1].value - total[0].value) / (total[-1].time_s - total[0].time_s))
                figures[f"{reason} {uuid}"] = ratios[-1]
        if not ratios:
            raise CheckSkippedError("no reason for a lower clock was given all the time")
        _expect(ratios, THROTTLE_RATIO, "seconds counted per second")
        return f"seconds counted per second of a lasting reason: {_span(ratios)}"

    def check_driver_units(self, figures: Figures) -> str:
        """The unit in which the driver counts throttled time: the one that agrees with the sidecar's seconds."""
        window, units = self._known_window(), dict[str, str | None]()
        for uuid, reason in self._reasons():
            before, after = window.before.get(uuid, {}).get(reason), window.after.get(uuid, {}).get(reason)
            total = self._in_window(uuid, "throttled_seconds_total", reason=reason)
            seconds = total[-1].value - total[0].value if len(total) > 1 else 0.0
            if before is None or after is None or seconds < MIN_THROTTLED_S:
                continue
            raw, reference = after.raw - before.raw, after.reference_raw - before.reference_raw
            key = f"{reason} {uuid}"
            units[key] = _unit(raw, seconds)
            figures |= {f"driver_raw {key}": raw, f"sidecar_s {key}": seconds, f"driver_unit {key}": units[key]}
            figures[f"reference_unit {key}"] = _unit(reference, window.end_s - window.start_s)
        if not units:
            raise CheckSkippedError(f"nothing throttled for {MIN_THROTTLED_S:g} s, so no unit can be told")
        unknown = [key for key, unit in units.items() if unit is None]
        if unknown or len(set(units.values())) > 1:
            raise CheckFailedError(f"the driver's throttled time agrees with no one unit: {units}")
        return f"the driver counts throttled time in {next(iter(units.values()))}"

    def _observe(self) -> Window:
        counters = DriverCounters()
        try:
            uuids = self._readings.uuids()
            before, start_s = {uuid: counters.read(uuid) for uuid in uuids}, time.time()
            self._readings.watch(self._seconds)
            return Window(start_s, time.time(), before, {uuid: counters.read(uuid) for uuid in uuids})
        finally:
            counters.close()

    def _known_window(self) -> Window:
        if self._window is None:
            raise CheckFailedError("there was no load to read under; see the check before")
        return self._window

    def _in_window(self, uuid: str, name: str, **labels: str) -> list[Point]:
        return self._known_window().of(self._readings.points(name, uuid, **labels))

    def _mean(self, uuid: str, name: str) -> float | None:
        points = self._in_window(uuid, name)
        return sum(point.value for point in points) / len(points) if points else None

    def _reasons(self) -> Iterator[tuple[str, str]]:
        return ((uuid, reason) for uuid in self._readings.uuids() for reason in REASONS)


def _integral(points: Sequence[Point]) -> float:
    """Of values over time, by trapezia."""
    return sum((b.time_s - a.time_s) * (a.value + b.value) / 2 for a, b in pairwise(points))


def _unit(raw: float, seconds: float) -> str | None:
    """The unit in which a raw count comes to so many seconds."""
    low, high = UNIT_RATIO
    return next((unit for unit, scale in UNITS.items() if low <= raw * scale / seconds <= high), None)


def _expect(ratios: Sequence[float], bounds: tuple[float, float], what: str) -> None:
    low, high = bounds
    if not all(low <= ratio <= high for ratio in ratios):
        raise CheckFailedError(f"{what}: {_span(ratios)}, should be {low:g} to {high:g}")


def _span(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.3f} to {max(ratios):.3f}"
