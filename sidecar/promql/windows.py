"""What range functions make of one window of samples, with the arithmetic of Prometheus 3.

Each takes a window that holds at least one sample and returns a value, or None where Prometheus gives no result.
"""

from sidecar.promql import statistics
from sidecar.promql.values import Window
from sidecar.store import MICROSECONDS_PER_S

EDGE_FACTOR = 1.1
"""A window edge this many average sample distances away, or farther, is taken to lie outside the series' life."""


def rate(window: Window) -> float | None:
    """Per-second increase of a counter, extrapolated to the window's edges."""
    increased = increase(window)
    return None if increased is None else increased / window.range_s


def increase(window: Window) -> float | None:
    """Increase of a counter over the window, extrapolated to its edges but never to before the counter was zero."""
    return _extrapolated(window, is_counter=True)


def delta(window: Window) -> float | None:
    """Difference of a gauge over the window, extrapolated to its edges."""
    return _extrapolated(window, is_counter=False)


def _extrapolated(window: Window, *, is_counter: bool) -> float | None:
    series, first, last = window.series, window.first, window.end - 1
    if last == first:
        return None
    first_us, last_us = series.times_us[first], series.times_us[last]
    difference = series.values[last] - series.values[first]
    if is_counter:
        for lost in series.losses(first_us, last_us):
            difference += lost

    sampled_s = (last_us - first_us) / MICROSECONDS_PER_S
    average_s = sampled_s / (last - first)
    to_start_s = _reach(first_us - window.start_us, average_s)
    to_end_s = _reach(window.end_us - last_us, average_s)
    if is_counter and difference > 0 and series.values[first] >= 0:
        to_start_s = min(to_start_s, sampled_s * (series.values[first] / difference))
    return difference * ((sampled_s + to_start_s + to_end_s) / sampled_s)


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


def sum_over_time(window: Window) -> float:
    """Sum of the samples."""
    return statistics.total(window.values)


def avg_over_time(window: Window) -> float:
    """Mean of the samples."""
    return statistics.mean(window.values)


def min_over_time(window: Window) -> float:
    """Least of the samples; NaN only if all are."""
    return statistics.smallest(window.values)


def max_over_time(window: Window) -> float:
    """Greatest of the samples; NaN only if all are."""
    return statistics.largest(window.values)


def count_over_time(window: Window) -> float:
    """Number of samples."""
    return float(window.end - window.first)


def last_over_time(window: Window) -> float:
    """Newest of the samples."""
    return window.series.values[window.end - 1]
