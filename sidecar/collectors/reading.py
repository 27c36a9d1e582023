"""What a collector is, and what one reading of it looks like.

A collector reads its values now and returns them fresh, or raises. It keeps no value to show again: a series that was
not read is absent, so that a dead sensor never looks like a steady one.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from shared.schema import Family
from sidecar.collectors.catalogue import RUNNER_FAMILIES
from sidecar.samples import ExportedFamily, Point, labels_of


class Collector(Protocol):
    """A source of values on this machine. Only its runner's thread calls it."""

    @property
    def name(self) -> str:
        """Short and fixed; the `collector` label."""

    def collect(self) -> Sequence[ExportedFamily]:
        """Read everything now; raise when the source as a whole cannot be read."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The newest outcome of one collector, or of one of its sources (a GPU), which fail each by itself.

    Of a failed reading `families` says no more than what has failed. `time_s` is Unix time.
    """

    collector: str
    source: str = ""
    success: bool
    time_s: float
    duration_s: float
    families: tuple[ExportedFamily, ...] = ()
    error: str = ""


def export(families: Iterable[Family], values: Iterable[Point]) -> tuple[ExportedFamily, ...]:
    """Group values under their families, in the families' order; families without a value are left out."""
    points: dict[str, list[Point]] = {}
    for value in values:
        points.setdefault(value[0], []).append(value)
    exported = tuple(
        ExportedFamily(family.name, family.kind, family.help, tuple(points.pop(family.name)))
        for family in families
        if family.name in points
    )
    assert not points, f"values of undeclared families: {sorted(points)}"
    return exported


def outcomes_of(readings: Sequence[Reading]) -> tuple[ExportedFamily, ...]:
    """How each collector fared: it worked if all its sources did, and took as long as the slowest."""
    success: dict[str, bool] = {}
    duration_s: dict[str, float] = {}
    for reading in readings:
        name = reading.collector
        success[name] = success.get(name, True) and reading.success
        duration_s[name] = max(duration_s.get(name, 0.0), reading.duration_s)
    values: list[Point] = []
    for name, worked in success.items():
        labels = labels_of(collector=name)
        values.append(("dflash_collector_success", labels, float(worked)))
        values.append(("dflash_collector_duration_seconds", labels, duration_s[name]))
    return export(RUNNER_FAMILIES, values)


def families_of(readings: Sequence[Reading]) -> tuple[ExportedFamily, ...]:
    """Everything the readings hold, and how each collector fared."""
    return (*(family for reading in readings for family in reading.families), *outcomes_of(readings))
