"""Quantiles of classic histograms, that is of cumulative `_bucket` series with an upper bound in the label `le`."""

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

from sidecar.promql.values import Vector
from sidecar.store import NAME_LABEL

if TYPE_CHECKING:
    from sidecar.samples import Labels

BUCKET_LABEL = "le"
COUNT_TOLERANCE = 1e-12
"""Relative difference of neighbouring counts below which it is taken for rounding."""


def histogram_quantile(quantile: float, vector: Vector) -> Vector:
    """Return the quantile of each histogram in the vector, by linear interpolation inside its bucket.

    Elements without a numeric `le` are ignored, as Prometheus does.
    """
    histograms: dict[Labels, dict[float, float]] = {}
    for labels, count in vector:
        try:
            upper_bound = float(dict(labels)[BUCKET_LABEL])
        except (KeyError, ValueError):
            continue
        rest = tuple(pair for pair in labels if pair[0] not in {BUCKET_LABEL, NAME_LABEL})
        buckets = histograms.setdefault(rest, {})
        buckets[upper_bound] = buckets.get(upper_bound, 0.0) + count
    return [(labels, _quantile(quantile, buckets)) for labels, buckets in histograms.items()]


def _quantile(quantile: float, buckets: dict[float, float]) -> float:
    """Return the quantile of one histogram, given the cumulative count at each upper bound."""
    if math.isnan(quantile):
        return math.nan
    if not 0 <= quantile <= 1:
        return math.copysign(math.inf, quantile)
    bounds = sorted(buckets)
    counts = _monotonic([buckets[bound] for bound in bounds])
    if bounds[-1] != math.inf or len(bounds) == 1 or counts[-1] == 0 or math.isnan(counts[-1]):
        return math.nan
    rank = quantile * counts[-1]
    index = bisect_left(counts, rank, hi=len(counts) - 1)
    if index == len(counts) - 1:
        return bounds[-2]
    if index == 0 and bounds[0] <= 0:
        return bounds[0]
    start, below = (bounds[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    inside = counts[index] - below
    return start + (bounds[index] - start) * ((rank - below) / inside) if inside else math.nan


def _monotonic(counts: list[float]) -> list[float]:
    """Never let a cumulative count fall, and level out differences that are only rounding."""
    levelled = counts[:1]
    for count in counts[1:]:
        previous = levelled[-1]
        is_rounding = abs(count - previous) < COUNT_TOLERANCE * (abs(count) + abs(previous))
        levelled.append(previous if count < previous or is_rounding else count)
    return levelled
