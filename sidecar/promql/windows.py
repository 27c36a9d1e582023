"""What range functions make of one window of samples, with the arithmetic of Prometheus 3.

Each takes a window that holds at least one sample and returns a value, or None where Prometheus gives no result.
"""

import math
import operator
from itertools import pairwise

from sidecar.promql import statistics
from sidecar.promql.values import Window
from sidecar.store import MICROSECONDS_PER_S

EDGE_FACTOR = 1.1
"""A window edge this many average sample distances away, or farther, is taken to lie outside the series' life."""


def rate(window: Window) -> float | None:
    """Per-second increase of a counter, extrapolated to the window's edges."""
    return _extrapolated(window, per_s=window.interval.length_s)


def increase(window: Window) -> float | None:
    """Increase of a counter over the window, extrapolated to its edges but never to before the counter was zero."""
    return _extrapolated(window)


def delta(window: Window) -> float | None:
    """Difference of a gauge over the window, extrapolated to its edges."""
    return _extrapolated(window, is_counter=False)


def _extrapolated(window: Window, *, is_counter: bool = True, per_s: float = 1.0) -> float | None:
    series, first, end, interval = window
    last = end - 1
    if last == first:
        return None
    times_us, values = series.times_us, series.values
    first_us, last_us = times_us[first], times_us[last]
    difference = values[last] - values[first]
    if is_counter and series.lost_us:
        for lost in series.losses(first_us, last_us):
            difference += lost

    sampled_s = (last_us - first_us) / MICROSECONDS_PER_S
    average_s = sampled_s / (last - first)
    to_start_s = _reach(first_us - interval.start_us, average_s)
    to_end_s = _reach(interval.end_us - last_us, average_s)
    if is_counter and difference > 0 and values[first] >= 0:
        to_start_s = min(to_start_s, sampled_s * (values[first] / difference))
    return difference * ((sampled_s + to_start_s + to_end_s) / sampled_s / per_s)


def _reach(gap_us: int, average_s: float) -> float:
    """How far to extrapolate towards an edge: all the way if it is near, else half a sample distance. Seconds."""
    gap_s = gap_us / MICROSECONDS_PER_S
    return average_s / 2 if gap_s >= average_s * EDGE_FACTOR else gap_s


def irate(window: Window) -> float | None:
    """Per-second increase between the newest two samples of a counter."""
    last = window.end - 1
    if last == window.first:
        return None
    times_us, values = window.series.times_us, window.series.values
    increased = values[last] if values[last] < values[last - 1] else values[last] - values[last - 1]
    return increased / ((times_us[last] - times_us[last - 1]) / MICROSECONDS_PER_S)


def idelta(window: Window) -> float | None:
    """Difference between the newest two samples of a gauge."""
    last = window.end - 1
    return None if last == window.first else window.series.values[last] - window.series.values[last - 1]


def deriv(window: Window) -> float | None:
    """Slope per second of a line through the samples."""
    if window.end - window.first == 1:
        return None
    return _line(window, window.series.times_us[window.first])[0]


def predict_linear(window: Window, ahead_s: float) -> float | None:
    """Value that a line through the samples has some seconds after the time of evaluation."""
    if window.end - window.first == 1:
        return None
    slope, now = _line(window, window.interval.time_us)
    return slope * ahead_s + now


def _line(window: Window, origin_us: int) -> tuple[float, float]:
    return statistics.line([(at - origin_us) / MICROSECONDS_PER_S for at in window.times_us], window.values)


def changes(window: Window) -> float:
    """Number of times that the value changed; from NaN to NaN is no change."""
    values = window.values
    num_changes = sum(map(operator.ne, values, values[1:]))
    if any(map(math.isnan, values)):
        num_changes -= sum(math.isnan(left) and math.isnan(right) for left, right in pairwise(values))
    return float(num_changes)


def resets(window: Window) -> float:
    """Number of times that the value fell."""
    times_us = window.series.times_us
    return float(len(window.series.losses(times_us[window.first], times_us[window.end - 1])))


def count_over_time(window: Window) -> float:
    """Number of samples."""
    return float(window.end - window.first)


def last_over_time(window: Window) -> float:
    """Newest of the samples."""
    return window.series.values[window.end - 1]


def quantile_over_time(window: Window, share: float) -> float:
    """Quantile of the samples."""
    return statistics.quantile(share, window.values)
