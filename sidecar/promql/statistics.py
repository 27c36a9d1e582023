"""Sums, means and extremes of float64 values as Prometheus takes them: accurate, with NaN and infinities."""

import math
from collections.abc import Sequence


def total(values: Sequence[float]) -> float:
    """Sum without accumulated rounding error."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)  # opposite infinities or an overflow: plain addition gives what IEEE 754 wants


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value; finite values give a finite mean even where their sum overflows."""
    summed = total(values)
    if math.isinf(summed) and all(map(math.isfinite, values)):
        return math.fsum(value / len(values) for value in values)
    return summed / len(values)


def smallest(values: Sequence[float]) -> float:
    """Least of at least one value; NaN only if all are."""
    return min(_numbers(values), default=math.nan)


def largest(values: Sequence[float]) -> float:
    """Greatest of at least one value; NaN only if all are."""
    return max(_numbers(values), default=math.nan)


def _numbers(values: Sequence[float]) -> Sequence[float]:
    """Leave NaN out. Python's min and max pass over it everywhere but in the first place."""
    return [value for value in values if not math.isnan(value)] if math.isnan(values[0]) else values


def count(values: Sequence[float]) -> float:
    """Number of values."""
    return float(len(values))
