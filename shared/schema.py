"""What a trainer counts: families, their series, and where each series lies in the flat array of cells.

A family is a Prometheus metric name with its kind, help text and label names; a series is one family with its label
values. The order of `Schema.series` fixes the layout: a counter or gauge takes one cell, a histogram one cell per
bucket (not cumulative, the last one unbounded) and one for the sum. The schema travels once, in the hello; after that
a snapshot is nothing but the array.
"""

import hashlib
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Kind = Literal["counter", "gauge", "histogram"]
# `\Z` and not `$`, which would let a line break through at the end. Names with two underscores are Prometheus's own.
MetricName = Annotated[str, Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*\Z", max_length=128)]
LabelName = Annotated[str, Meta(pattern=r"^(?!__)[a-zA-Z_][a-zA-Z0-9_]*\Z", max_length=64)]
LabelValue = Annotated[str, Meta(max_length=256)]

MAX_SERIES = 20_000
"""More series than this in one trainer is a mistake."""
MAX_CELLS = 100_000
"""With their buckets. It keeps a snapshot far below the size that a frame may have (`shared.wire`)."""
MAX_BUCKETS = 200
RESERVED_LABELS = frozenset({"le", "rank", "run"})
"""The sidecar puts these on a trainer's series itself."""


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric: its full Prometheus name (`_total` included), kind, help, label names and bucket bounds."""

    name: MetricName
    kind: Kind
    help: Annotated[str, Meta(max_length=1_000)]
    labels: Annotated[tuple[LabelName, ...], Meta(max_length=16)] = ()
    buckets: Annotated[tuple[float, ...], Meta(max_length=MAX_BUCKETS)] = ()

    def __post_init__(self) -> None:
        if len(set(self.labels)) != len(self.labels):
            raise ValueError(f"{self.name}: labels {self.labels} hold a name twice")
        # Also false for NaN. OpenMetrics has no sum for a histogram with bounds below 0.
        if not all(low < high for low, high in pairwise((-math.ulp(0.0), *self.buckets, math.inf))):
            raise ValueError(f"{self.name}: bucket bounds must be finite, at least 0, and rise")

    @property
    def cells_per_series(self) -> int:
        """Number of float64 cells one series of this family occupies."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1


class Series(msgspec.Struct, frozen=True, array_like=True):
    """One time series: the index of its family and its label values in the family's order."""

    family: Annotated[int, Meta(ge=0)]
    labels: tuple[LabelValue, ...] = ()


class Schema(msgspec.Struct, frozen=True, array_like=True):
    """Every series of a trainer, in cell order. Raises ValueError when it contradicts itself."""

    families: Annotated[tuple[Family, ...], Meta(max_length=1_000)]
    series: Annotated[tuple[Series, ...], Meta(max_length=MAX_SERIES)]

    def __post_init__(self) -> None:
        for series in self.series:
            if series.family >= len(self.families):
                raise ValueError(f"series refers to family {series.family} of {len(self.families)}")
            family = self.families[series.family]
            if len(series.labels) != len(family.labels):
                raise ValueError(f"{family.name}: {len(series.labels)} label values for {len(family.labels)} labels")
        if len({(s.family, s.labels) for s in self.series}) != len(self.series):
            raise ValueError("a series is declared twice")
        if len({family.name for family in self.families}) != len(self.families):
            raise ValueError("a family is declared twice")
        if RESERVED_LABELS & {label for family in self.families for label in family.labels}:
            raise ValueError(f"the labels {sorted(RESERVED_LABELS)} are put on by the sidecar")
        if self.num_cells > MAX_CELLS:
            raise ValueError(f"{self.num_cells} cells, at most {MAX_CELLS}")

    @property
    def num_cells(self) -> int:
        """Length of the value array that belongs to this schema."""
        return sum(self.families[s.family].cells_per_series for s in self.series)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that change whenever the layout does."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]

    def layout(self) -> Iterator[tuple[int, Family, dict[str, str]]]:
        """Yield (first cell, family, labels) of each series in cell order."""
        cell = 0
        for series in self.series:
            family = self.families[series.family]
            yield cell, family, dict(zip(family.labels, series.labels, strict=True))
            cell += family.cells_per_series
