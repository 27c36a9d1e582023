"""The values that flow through the sidecar: one sample, one exported family, one immutable result."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from shared.schema import Kind

HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")
RUN_LABEL = "run"
"""On the series of a trainer that was accepted beside one of another run."""
Labels = tuple[tuple[str, str], ...]
"""Label pairs sorted by name, without the metric name."""
Point = tuple[str, Labels, float]
"""Sample name, labels and value."""


class Sample(NamedTuple):
    """One value of one series at one time (Unix seconds)."""

    name: str
    labels: Labels
    time_s: float
    value: float


class ExportedFamily(msgspec.Struct, frozen=True):
    """One family as `/metrics` shows it. Points carry the sample name in full (`..._total`, `..._bucket`)."""

    name: str
    kind: Kind
    help: str
    points: tuple[Point, ...]


class Result(msgspec.Struct, frozen=True):
    """Everything that one evaluation found. It is built whole and then swapped in, so a scrape never sees a mixture.

    A family may come in several parts; `sidecar.exposition.merged` makes one of them, when somebody asks for the page.
    """

    time_s: float
    families: tuple[ExportedFamily, ...] = ()


def labels_of(**pairs: str) -> Labels:
    """Labels from keyword arguments, sorted."""
    return tuple(sorted(pairs.items()))


def with_label(labels: Labels, name: str, value: str) -> Labels:
    """Labels and one more, sorted."""
    return tuple(sorted((*labels, (name, value))))


def samples_of(families: Iterable[ExportedFamily], time_s: float) -> list[Sample]:
    """Every point of the families as a sample at one time."""
    return [Sample(name, labels, time_s, value) for family in families for name, labels, value in family.points]


def occupied_names(name: str, kind: str) -> tuple[str, ...]:
    """The names that a metric takes for itself on a page; OpenMetrics calls a counter by its name without `_total`."""
    if kind == "histogram":
        return (name, *(name + suffix for suffix in HISTOGRAM_SUFFIXES))
    return (name, name.removesuffix("_total")) if kind == "counter" else (name,)
