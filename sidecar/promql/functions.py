"""The functions of the language. A new one is a line in `FUNCTIONS`; a range function is also a function of a window.

Every entry takes the evaluated arguments and the time in Unix seconds. Their number and types were checked when the
expression was parsed.
"""

import math
from collections.abc import Callable, Sequence

from sidecar.promql import windows
from sidecar.promql.histograms import histogram_quantile
from sidecar.promql.values import Matrix, Value, Vector, Window, distinct, without_name

Function = Callable[[Sequence[Value], float], Value]


def _number(value: Value) -> float:
    assert isinstance(value, float)
    return value


def _vector(value: Value) -> Vector:
    assert isinstance(value, list)
    return value


def _over_windows(function: Callable[[Window], float | None], *, keeps_name: bool = False) -> Function:
    """Apply a function of a window to each series, leaving out those for which it gives nothing."""

    def apply(arguments: Sequence[Value], _time_s: float) -> Value:
        (matrix,) = arguments
        assert isinstance(matrix, Matrix)
        vector: Vector = []
        for window in matrix.windows:
            value = function(window)
            if value is not None:
                vector.append((window.series.identity if keeps_name else window.series.labels, value))
        return distinct(vector)

    return apply


def _elementwise(function: Callable[..., float]) -> Function:
    """Apply a function of a value and further numbers to each element of the vector that comes first."""

    def apply(arguments: Sequence[Value], _time_s: float) -> Value:
        numbers = [_number(argument) for argument in arguments[1:]]
        vector = _vector(arguments[0])
        return distinct([(without_name(labels), function(value, *numbers)) for labels, value in vector])

    return apply


def _clamp_min(value: float, least: float) -> float:
    return math.nan if math.isnan(value) or math.isnan(least) else max(value, least)


def _clamp_max(value: float, most: float) -> float:
    return math.nan if math.isnan(value) or math.isnan(most) else min(value, most)


def _scalar(arguments: Sequence[Value], _time_s: float) -> Value:
    vector = _vector(arguments[0])
    return vector[0][1] if len(vector) == 1 else math.nan


def _to_vector(arguments: Sequence[Value], _time_s: float) -> Value:
    return [((), _number(arguments[0]))]


def _time(_arguments: Sequence[Value], time_s: float) -> Value:
    return time_s


def _histogram_quantile(arguments: Sequence[Value], _time_s: float) -> Value:
    return histogram_quantile(_number(arguments[0]), _vector(arguments[1]))


FUNCTIONS: dict[str, Function] = {
    "rate": _over_windows(windows.rate),
    "irate": _over_windows(windows.irate),
    "increase": _over_windows(windows.increase),
    "delta": _over_windows(windows.delta),
    "avg_over_time": _over_windows(windows.avg_over_time),
    "sum_over_time": _over_windows(windows.sum_over_time),
    "min_over_time": _over_windows(windows.min_over_time),
    "max_over_time": _over_windows(windows.max_over_time),
    "count_over_time": _over_windows(windows.count_over_time),
    "last_over_time": _over_windows(windows.last_over_time, keeps_name=True),
    "histogram_quantile": _histogram_quantile,
    "abs": _elementwise(abs),
    "clamp_min": _elementwise(_clamp_min),
    "clamp_max": _elementwise(_clamp_max),
    "scalar": _scalar,
    "vector": _to_vector,
    "time": _time,
}
