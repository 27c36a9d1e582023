"""What a collector is, and what one reading of it looks like.

A collector reads its values now and returns them fresh, or raises. It keeps no value to show again: a series that was
not read is absent, so that a dead sensor never looks like a steady one.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from shared.schema import Family
from sidecar.collectors.catalogue import RUNNER_FAMILIES
from sidecar.samples import ExportedFamily, Labels, labels_of

Value = tuple[str, Labels, float]
"""Name, labels and value of one point."""


class Collector(Protocol):
    """A source of values on this machine. Only its runner's thread calls it."""

    @property
    def name(self) -> str:
        """Short and fixed; the `collector` label."""

    def collect(self) -> Sequence[ExportedFamily]:
        """Read everything now; raise when the source as a whole cannot be read."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The newest outcome of one collector; `families` is empty unless it worked. `time_s` is Unix time."""

    collector: str
    success: bool
    time_s: float
    duration_s: float
    families: tuple[ExportedFamily, ...] = ()
    error: str = ""


def export(families: Iterable[Family], values: Iterable[Value]) -> tuple[ExportedFamily, ...]:
    """Group values under their families, in the families' order; families without a value are left out."""
    points: dict[str, list[Value]] = {}
    for value in values:
        points.setdefault(value[0], []).append(value)
    exported = tuple(
        ExportedFamily(family.name, family.kind, family.help, tuple(points.pop(family.name)))
        for family in families
        if family.name in points
    )
    assert not points, f"values of undeclared families: {sorted(points)}"
    return exported


def families_of(readings: Sequence[Reading]) -> tuple[ExportedFamily, ...]:
    """Everything the readings hold, and how each collector fared."""
    values: list[Value] = []
    for reading in readings:
        labels = labels_of(collector=reading.collector)
        values.append(("dflash_collector_success", labels, float(reading.success)))
        values.append(("dflash_collector_duration_seconds", labels, reading.duration_s))
    return (*(family for reading in readings for family in reading.families), *export(RUNNER_FAMILIES, values))
