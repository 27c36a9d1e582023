"""Quantiles and shares of classic histograms: cumulative `_bucket` series with an upper bound in the label `le`."""

import functools
import math
import re
import sys
from bisect import bisect_left
from itertools import pairwise

from sidecar.promql.arithmetic import divide
from sidecar.promql.values import Vector, distinct, without_name
from sidecar.samples import Labels

BUCKET_LABEL = "le"
COUNT_TOLERANCE = 1e-12
"""Relative difference of neighbouring counts below which it is taken for rounding."""
_DIGITS = "[0-9](?:_?[0-9])*"
_NUMBER = re.compile(
    rf"[-+]?(?:(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:e[-+]?{_DIGITS})?|inf|infinity)|nan", re.IGNORECASE
)

Buckets = dict[float, float]
"""Cumulative count by upper bound."""


def histogram_quantile(quantile: float, vector: Vector) -> Vector:
    """Return the quantile of each histogram in the vector, by linear interpolation inside its bucket."""
    return distinct([(labels, _quantile(quantile, buckets)) for labels, buckets in _histograms(vector)])


def histogram_fraction(lower: float, upper: float, vector: Vector) -> Vector:
    """Return the share of observations between two bounds, by linear interpolation inside the buckets."""
    return distinct([(labels, _fraction(lower, upper, buckets)) for labels, buckets in _histograms(vector)])


def _histograms(vector: Vector) -> list[tuple[Labels, Buckets]]:
    """Gather the buckets of each histogram. Elements without a numeric `le` are ignored, as Prometheus does."""
    histograms: dict[Labels, Buckets] = {}
    for labels, count in vector:
        bound = next((_bound(value) for label, value in labels if label == BUCKET_LABEL), None)
        if bound is not None:
            rest = tuple(pair for pair in labels if pair[0] != BUCKET_LABEL)
            buckets = histograms.setdefault(rest, {})
            buckets[bound] = buckets.get(bound, 0.0) + count
    return [(without_name(labels), buckets) for labels, buckets in histograms.items()]


@functools.lru_cache(maxsize=4096)
def _bound(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _quantile(quantile: float, buckets: Buckets) -> float:
    """Return the quantile of one histogram."""
    if math.isnan(quantile):
        return math.nan
    if not 0 <= quantile <= 1:
        return math.copysign(math.inf, quantile)
    bounds = sorted(buckets)
    counts = _monotonic([buckets[bound] for bound in bounds])
    if bounds[-1] != math.inf or len(bounds) == 1 or counts[-1] == 0:
        return math.nan
    rank = quantile * counts[-1]
    index = bisect_left(range(len(counts) - 1), x=True, key=lambda at: counts[at] >= rank)
    if index == len(counts) - 1:
        return bounds[-2]
    if index == 0 and bounds[0] <= 0:
        return bounds[0]
    start, below = (bounds[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    return start + (bounds[index] - start) * divide(rank - below, counts[index] - below)


def _monotonic(counts: list[float]) -> list[float]:
    """Never let a cumulative count fall, and level out differences that are only rounding."""
    levelled = counts[:1]
    for count in counts[1:]:
        previous = levelled[-1]
        levelled.append(previous if count < previous or _almost_equal(previous, count) else count)
    return levelled


def _almost_equal(left: float, right: float) -> bool:
    magnitude = abs(left) + abs(right)
    if left == 0 or right == 0 or magnitude < sys.float_info.min:
        return abs(left - right) < COUNT_TOLERANCE * sys.float_info.min
    return abs(left - right) / min(magnitude, sys.float_info.max) < COUNT_TOLERANCE


def _fraction(lower: float, upper: float, buckets: Buckets) -> float:
    """Return the share of one histogram between two bounds."""
    bounds = sorted(buckets)
    if bounds[-1] != math.inf or buckets[math.inf] == 0 or math.isnan(lower) or math.isnan(upper):
        return math.nan
    if lower >= upper:
        return 0.0
    count = buckets[math.inf]
    edges = [(-math.inf, 0.0), *((bound, buckets[bound]) for bound in bounds)]
    return divide(_rank(upper, edges) - _rank(lower, edges), count)


def _rank(value: float, edges: list[tuple[float, float]]) -> float:
    """Return how many observations lie below a value, at most all, given the count up to each edge."""
    count = edges[-1][1]
    for (start, below), (end, up_to) in pairwise(edges):
        if start >= value:
            return min(below, count)
        if end > value:
            return min(below + divide((up_to - below) * (value - start), end - start), count)
    return count
