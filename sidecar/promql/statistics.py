"""Statistics of float64 values as Prometheus takes them: accurate, with NaN and infinities.

Prometheus adds with Neumaier's compensation, one value after another. `math.fsum` is exact and many times faster in
Python; the two agree to the last bits unless the values nearly cancel out, and then the slow way is taken.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from sidecar.promql.arithmetic import divide, square_root

CANCELLATION = 1e-6
"""Sum over the sum of magnitudes below which compensated and exact sums may differ visibly."""


def compensated(value: float, summed: float, lost: float) -> tuple[float, float]:
    """Add a value to a sum whose rounding error so far is `lost`; return the new pair."""
    grown = summed + value
    if math.isinf(grown):
        return grown, 0.0
    if abs(summed) >= abs(value):
        return grown, lost + ((summed - grown) + value)
    return grown, lost + ((value - grown) + summed)


def _exact(values: Sequence[float]) -> float | None:
    """Exact sum, None where compensated addition may give something else."""
    try:
        exact = math.fsum(values)
        if not math.isfinite(exact):
            return None
        if min(values) >= 0 or abs(exact) > CANCELLATION * math.fsum(map(abs, values)):
            return exact
    except (ValueError, OverflowError):
        pass  # opposite infinities, or a sum beyond the largest number
    return None


def total(values: Sequence[float]) -> float:
    """Sum of the values."""
    if (exact := _exact(values)) is not None:
        return exact
    summed = lost = 0.0
    for value in values:
        summed, lost = compensated(value, summed, lost)
    return summed if math.isinf(summed) else summed + lost


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value; finite values give a finite mean even where their sum overflows."""
    count = len(values)
    if (exact := _exact(values)) is not None:
        return exact / count
    summed, lost = values[0], 0.0
    for index in range(1, count):
        grown, error = compensated(values[index], summed, lost)
        if math.isinf(grown):
            return _incremental_mean(values, index, summed / index, lost / index)
        summed, lost = grown, error
    return summed / count + lost / count


def _incremental_mean(values: Sequence[float], start: int, average: float, lost: float) -> float:
    """Go on with the mean of the first `start` values without ever holding their sum."""
    for index in range(start, len(values)):
        share = index / (index + 1)
        average, lost = compensated(values[index] / (index + 1), share * average, share * lost)
    return average + lost


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


def one(_values: Sequence[float]) -> float:
    """Return 1, whatever the values."""
    return 1.0


def quantile(share: float, values: Sequence[float]) -> float:
    """Quantile of at least one value, between two of them their weighted mean; NaN is taken for the least."""
    if math.isnan(share):
        return math.nan
    if not 0 <= share <= 1:
        return math.copysign(math.inf, share)
    numbers = sorted(value for value in values if not math.isnan(value))
    ordered = [math.nan] * (len(values) - len(numbers)) + numbers
    rank = share * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(len(ordered) - 1, below + 1)
    weight = rank - below
    return ordered[below] * (1 - weight) + ordered[above] * weight


def variance_of_group(values: Sequence[float]) -> float:
    """Population variance of values at one time, by Welford's recurrence without compensation."""
    average = values[0]
    squares = 0.0 if math.isfinite(average) else math.nan
    for index in range(1, len(values)):
        difference = values[index] - average
        average += difference / (index + 1)
        squares += difference * (values[index] - average)
    return squares / len(values)


def variance_over_time(values: Sequence[float]) -> float:
    """Population variance of values over time, by Welford's recurrence with compensation."""
    average = average_lost = squares = squares_lost = 0.0
    for number, value in enumerate(values, start=1):
        difference = value - (average + average_lost)
        average, average_lost = compensated(difference / number, average, average_lost)
        product = difference * (value - (average + average_lost))
        squares, squares_lost = compensated(product, squares, squares_lost)
    return (squares + squares_lost) / len(values)


def deviation(variance: Callable[[Sequence[float]], float]) -> Callable[[Sequence[float]], float]:
    """Return the standard deviation that belongs to a variance."""

    def root(values: Sequence[float]) -> float:
        return square_root(variance(values))

    return root


def line(points_s: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Least-squares line through at least two points: slope per second and value at zero seconds."""
    first = values[0]
    if all(value == first for value in values):
        return (math.nan, math.nan) if math.isinf(first) else (0.0, first)
    num = len(values)
    sum_x, sum_y = _compensated_sum(points_s), _compensated_sum(values)
    sum_xy = _compensated_sum(x * y for x, y in zip(points_s, values, strict=True))
    sum_xx = _compensated_sum(x * x for x in points_s)
    slope = divide(sum_xy - sum_x * sum_y / num, sum_xx - sum_x * sum_x / num)
    return slope, sum_y / num - slope * sum_x / num


def _compensated_sum(values: Iterable[float]) -> float:
    summed = lost = 0.0
    for value in values:
        summed, lost = compensated(value, summed, lost)
    return summed + lost
