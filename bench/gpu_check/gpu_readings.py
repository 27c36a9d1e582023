"""What the sidecar's own collector reads of the GPUs, over a few seconds."""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, Self

from bench.gpu_check.outcome import CheckFailedError, Figures
from sidecar.collectors.nvml import GpuFleet
from sidecar.collectors.nvml_catalogue import EVENT_FAMILIES, GPU_FAMILIES
from sidecar.samples import Labels

INTERVAL_S = 0.1
POLL_S = 0.02
DEADLINE_S = 5.0
CLOSE_S = 5.0
FIELDS_S = 4.0
"""Long enough for the slow readings (every ten intervals) and the second sample of those over a window."""
EXPECTED = (
    "dflash_gpu_up",
    "dflash_gpu_info",
    "dflash_gpu_utilization_ratio",
    "dflash_gpu_memory_used_bytes",
    "dflash_gpu_memory_total_bytes",
    "dflash_gpu_temperature_celsius",
    "dflash_gpu_power_watts",
    "dflash_gpu_sm_clock_hertz",
    "dflash_gpu_memory_clock_hertz",
)
"""What every NVIDIA GPU of a training machine says of itself."""
NOT_OF_DIVIDED = "dflash_gpu_utilization_ratio"
"""While MIG is on, the driver says it neither of the GPU nor of its instances."""
MAYBE_NEVER = frozenset(family.name for family in EVENT_FAMILIES)
"""These have no series until something has happened."""


class Point(NamedTuple):
    """A value and when its reading began, in Unix time."""

    time_s: float
    value: float


class GpuReadings:
    """Reads all GPUs while it is entered, and keeps every value."""

    def __init__(self) -> None:
        self._fleet = GpuFleet(INTERVAL_S, DEADLINE_S)
        self._series: dict[tuple[str, Labels], list[Point]] = {}
        self.errors: dict[str, str] = {}
        """The newest failure of each collector and source."""

    def __enter__(self) -> Self:
        self._fleet.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fleet.close(CLOSE_S)

    def watch(self, seconds: float) -> None:
        """Go on reading for so long."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._take()
            time.sleep(POLL_S)

    def uuids(self) -> list[str]:
        """Every GPU that was up."""
        return sorted(
            dict(labels)["uuid"]
            for (name, labels), points in self._series.items()
            if name == "dflash_gpu_up" and any(point.value == 1.0 for point in points)
        )

    def is_divided(self, uuid: str) -> bool:
        """Whether MIG instances were seen on a GPU, which share its place on the bus."""
        infos = [dict(labels) for name, labels in self._series if name == "dflash_gpu_info"]
        places = {info["pci_bus_id"] for info in infos if info["uuid"] == uuid}
        return any(info["pci_bus_id"] in places and info["uuid"].startswith("MIG-") for info in infos)

    def points(self, name: str, uuid: str, **labels: str) -> list[Point]:
        """The values of one series, oldest first; `name` without its common beginning."""
        wanted = {"uuid": uuid, **labels}
        return self._series.get((f"dflash_gpu_{name}", tuple(sorted(wanted.items()))), [])

    def newest(self) -> Iterator[tuple[str, Labels, float]]:
        """The newest value of every series, in the order of names."""
        for (name, labels), points in sorted(self._series.items()):
            yield name, labels, points[-1].value

    def _take(self) -> None:
        for reading in self._fleet.latest():
            if not reading.success:
                self.errors[f"{reading.collector} {reading.source}".strip()] = reading.error
            for family in reading.families:
                for name, labels, value in family.points:
                    points = self._series.setdefault((name, labels), [])
                    if not points or points[-1].time_s < reading.time_s:
                        points.append(Point(reading.time_s, value))


def check_fields(readings: GpuReadings, figures: Figures) -> str:
    """Every GPU is up and says what every GPU can say; what is missing beyond that is listed."""
    readings.watch(FIELDS_S)
    uuids = readings.uuids()
    names = {name for name, _, _ in readings.newest()}
    figures["gpus"] = uuids
    figures["series_count"] = sum(1 for _ in readings.newest())
    figures["families_read"] = sorted(names)
    figures["families_not_supported"] = sorted({f.name for f in GPU_FAMILIES} - names - MAYBE_NEVER)
    errors = sorted(f"{source}: {error}" for source, error in readings.errors.items())
    figures["errors"] = errors
    if not uuids:
        raise CheckFailedError("the driver shows no GPU: " + ("; ".join(errors) or "no reading"))
    missing = [f"{name} of {uuid}" for uuid in uuids for name in EXPECTED if not _has(readings, name, uuid)]
    if missing:
        raise CheckFailedError(f"not read: {', '.join(missing)}")
    if errors:
        raise CheckFailedError(f"readings failed: {'; '.join(errors)}")
    return f"{len(uuids)} GPUs, {len(names)} families of {len(GPU_FAMILIES)}, {figures['series_count']} series"


def _has(readings: GpuReadings, name: str, uuid: str) -> bool:
    if name == NOT_OF_DIVIDED and readings.is_divided(uuid):
        return True
    return any(found == name and ("uuid", uuid) in labels for found, labels, _ in readings.newest())
