"""What range functions make of one window of samples, with the arithmetic of Prometheus 3.

Each takes a series, the indices `first` to `end - 1` of the samples in the window, of which there is at least one, and
the interval that the window spans. It returns a value, or None where Prometheus gives no result.
"""

import math
import operator
from collections.abc import Callable
from itertools import pairwise

from sidecar.promql import statistics
from sidecar.promql.values import Interval
from sidecar.store import MICROSECONDS_PER_S, Series

EDGE_FACTOR = 1.1
"""A window edge this many average sample distances away, or farther, is taken to lie outside the series' life."""


def _extrapolation(*, is_counter: bool, is_rate: bool) -> Callable[[Series, int, int, Interval], float | None]:
    """Return the function that takes the difference between the ends of a window as if samples went on to its edges.

    To an edge that is near all the way, else by half a sample distance; of a counter never to before it was zero. The
    function is in one piece because it is half of what an evaluation costs.
    """

    def extrapolated(series: Series, first: int, end: int, interval: Interval) -> float | None:
        last = end - 1
        if last == first:
            return None
        times_us, values = series.times_us, series.values
        first_us, last_us, first_value = times_us[first], times_us[last], values[first]
        difference = values[last] - first_value
        if is_counter and series.lost_us:
            for lost in series.losses(first_us, last_us):
                difference += lost

        start_us, end_us, _ = interval
        sampled_s = (last_us - first_us) / MICROSECONDS_PER_S
        average_s = sampled_s / (last - first)
        to_start_s = (first_us - start_us) / MICROSECONDS_PER_S
        if to_start_s >= average_s * EDGE_FACTOR:
            to_start_s = average_s / 2
        if is_counter and difference > 0 and first_value >= 0:
            to_zero_s = sampled_s * (first_value / difference)
            to_start_s = min(to_start_s, to_zero_s)
        to_end_s = (end_us - last_us) / MICROSECONDS_PER_S
        if to_end_s >= average_s * EDGE_FACTOR:
            to_end_s = average_s / 2
        factor = (sampled_s + to_start_s + to_end_s) / sampled_s
        return difference * (factor / ((end_us - start_us) / MICROSECONDS_PER_S) if is_rate else factor)

    return extrapolated


rate = _extrapolation(is_counter=True, is_rate=True)
"""Per-second increase of a counter."""
increase = _extrapolation(is_counter=True, is_rate=False)
"""Increase of a counter over the window."""
delta = _extrapolation(is_counter=False, is_rate=False)
"""Difference of a gauge over the window."""


def irate(series: Series, first: int, end: int, _interval: Interval) -> float | None:
    """Per-second increase between the newest two samples of a counter."""
    last = end - 1
    if last == first:
        return None
    times_us, values = series.times_us, series.values
    increased = values[last] if values[last] < values[last - 1] else values[last] - values[last - 1]
    return increased / ((times_us[last] - times_us[last - 1]) / MICROSECONDS_PER_S)


def idelta(series: Series, first: int, end: int, _interval: Interval) -> float | None:
    """Difference between the newest two samples of a gauge."""
    return None if end - first == 1 else series.values[end - 1] - series.values[end - 2]


def deriv(series: Series, first: int, end: int, _interval: Interval) -> float | None:
    """Slope per second of a line through the samples."""
    return None if end - first == 1 else _line(series, first, end, series.times_us[first])[0]


def predict_linear(series: Series, first: int, end: int, interval: Interval, ahead_s: float) -> float | None:
    """Value that a line through the samples has some seconds after the time of evaluation."""
    if end - first == 1:
        return None
    slope, now = _line(series, first, end, interval.time_us)
    return slope * ahead_s + now


def _line(series: Series, first: int, end: int, origin_us: int) -> tuple[float, float]:
    points_s = [(at - origin_us) / MICROSECONDS_PER_S for at in series.times_us[first:end]]
    return statistics.line(points_s, series.values[first:end])


def changes(series: Series, first: int, end: int, _interval: Interval) -> float:
    """Number of times that the value changed; from NaN to NaN is no change."""
    values = series.values[first:end]
    num_changes = sum(map(operator.ne, values, values[1:]))
    if any(map(math.isnan, values)):
        num_changes -= sum(math.isnan(left) and math.isnan(right) for left, right in pairwise(values))
    return float(num_changes)


def resets(series: Series, first: int, end: int, _interval: Interval) -> float:
    """Number of times that the value fell."""
    return float(len(series.losses(series.times_us[first], series.times_us[end - 1])))


def count_over_time(_series: Series, first: int, end: int, _interval: Interval) -> float:
    """Number of samples."""
    return float(end - first)


def last_over_time(series: Series, _first: int, end: int, _interval: Interval) -> float:
    """Newest of the samples."""
    return series.values[end - 1]


def quantile_over_time(series: Series, first: int, end: int, _interval: Interval, share: float) -> float:
    """Quantile of the samples."""
    return statistics.quantile(share, series.values[first:end])
