"""The functions of the language. A new one is a line in `FUNCTIONS`; a range function is also a function of a window.

Every entry takes an invocation: the evaluated arguments, as they were written, and the time. Their number and types
were checked when the expression was parsed.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sidecar.promql import arithmetic, dates, statistics, windows
from sidecar.promql.histograms import histogram_fraction, histogram_quantile
from sidecar.promql.nodes import Node
from sidecar.promql.relabeling import label_join, label_replace, labels_of_absence
from sidecar.promql.values import Interval, Matrix, Value, Vector, distinct, without_name
from sidecar.store import Series


class Invocation(NamedTuple):
    """The values of the arguments, their expressions, and the time in Unix seconds."""

    values: Sequence[Value]
    nodes: Sequence[Node]
    time_s: float

    @property
    def vector(self) -> Vector:
        """The vector among the arguments."""
        return next(value for value in self.values if isinstance(value, list))

    @property
    def matrix(self) -> Matrix:
        """The windows among the arguments."""
        return next(value for value in self.values if isinstance(value, Matrix))

    @property
    def numbers(self) -> list[float]:
        """The numbers among the arguments."""
        return [value for value in self.values if isinstance(value, float)]

    @property
    def texts(self) -> list[str]:
        """The strings among the arguments."""
        return [value for value in self.values if isinstance(value, str)]


Function = Callable[[Invocation], Value]


def _over_windows(function: Callable[..., float | None], *, keeps_name: bool = False) -> Function:
    """Apply a function of a window, and of the numbers among the arguments, to each series; leave out None."""

    def apply(invocation: Invocation) -> Value:
        (spans, interval, of_one_name), numbers = invocation.matrix, invocation.numbers
        vector: Vector = []
        for series, first, end in spans:
            value = function(series, first, end, interval, *numbers)
            if value is not None:
                vector.append((series.identity if keeps_name else series.labels, value))
        return vector if of_one_name else distinct(vector)

    return apply


def _over_time(statistic: Callable[[Sequence[float]], float]) -> windows.Function:
    def of_window(series: Series, first: int, end: int, _interval: Interval) -> float:
        return statistic(series.values[first:end])

    return of_window


def _elementwise(function: Callable[..., float]) -> Function:
    """Apply a function of a value, and of the numbers among the arguments, to each element."""

    def apply(invocation: Invocation) -> Value:
        numbers = invocation.numbers
        return distinct([(without_name(labels), function(value, *numbers)) for labels, value in invocation.vector])

    return apply


def _of_date(part: Callable[[float], float]) -> Function:
    """Apply a part of a date to each element, or to the time of evaluation without an argument."""
    of_elements = _elementwise(part)

    def apply(invocation: Invocation) -> Value:
        return of_elements(invocation) if invocation.values else [((), part(math.floor(invocation.time_s)))]

    return apply


def _clamp(invocation: Invocation, least: float, most: float) -> Value:
    if most < least:
        return []
    clamped = [
        (without_name(labels), arithmetic.greater(least, arithmetic.lesser(most, value)))
        for labels, value in invocation.vector
    ]
    return distinct(clamped)


def _absent(invocation: Invocation) -> Value:
    (value,) = invocation.values
    present = value.spans if isinstance(value, Matrix) else value
    return [] if present else [(labels_of_absence(invocation.nodes[0]), 1.0)]


def _scalar(invocation: Invocation) -> Value:
    vector = invocation.vector
    return vector[0][1] if len(vector) == 1 else math.nan


def _sorted(invocation: Invocation, *, descending: bool) -> Value:
    """Order by value, NaN last either way."""
    sign = -1 if descending else 1
    return sorted(invocation.vector, key=lambda element: (math.isnan(element[1]), sign * element[1]))


def _timestamp(invocation: Invocation) -> Value:
    """Give the time of evaluation: that of the samples is known only to the selector itself, see the engine."""
    return distinct([(without_name(labels), invocation.time_s) for labels, _ in invocation.vector])


_OF_NUMBERS: dict[str, Callable[..., float]] = {
    "abs": abs,
    "ceil": arithmetic.ceil,
    "floor": arithmetic.floor,
    "round": arithmetic.round_to,
    "sgn": arithmetic.sign,
    "sqrt": arithmetic.square_root,
    "exp": arithmetic.total(math.exp),
    "ln": arithmetic.ln,
    "log2": arithmetic.log2,
    "log10": arithmetic.log10,
    "deg": arithmetic.degrees,
    "rad": arithmetic.radians,
    "atanh": arithmetic.atanh,
    **{
        name: arithmetic.total(getattr(math, name))
        for name in ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh")
    },
}
_OF_VALUES_OVER_TIME: dict[str, Callable[[Sequence[float]], float]] = {
    "avg": statistics.mean,
    "sum": statistics.total,
    "min": statistics.smallest,
    "max": statistics.largest,
    "present": statistics.one,
    "stdvar": statistics.variance_over_time,
    "stddev": statistics.deviation(statistics.variance_over_time),
}
OF_WINDOWS: dict[str, windows.Function] = {
    "rate": windows.rate,
    "irate": windows.irate,
    "increase": windows.increase,
    "delta": windows.delta,
    "idelta": windows.idelta,
    "deriv": windows.deriv,
    "changes": windows.changes,
    "resets": windows.resets,
    "count_over_time": windows.count_over_time,
    **{f"{name}_over_time": _over_time(statistic) for name, statistic in _OF_VALUES_OVER_TIME.items()},
}
"""Range functions without a further argument, which drop the name."""
_OTHERS: dict[str, Function] = {
    "predict_linear": _over_windows(windows.predict_linear),
    "quantile_over_time": _over_windows(windows.quantile_over_time),
    "last_over_time": _over_windows(windows.last_over_time, keeps_name=True),
    "absent": _absent,
    "absent_over_time": _absent,
    "clamp": lambda call: _clamp(call, call.numbers[0], call.numbers[1]),
    "clamp_min": lambda call: _clamp(call, call.numbers[0], math.inf),
    "clamp_max": lambda call: _clamp(call, -math.inf, call.numbers[0]),
    "histogram_quantile": lambda call: histogram_quantile(call.numbers[0], call.vector),
    "histogram_fraction": lambda call: histogram_fraction(call.numbers[0], call.numbers[1], call.vector),
    "label_join": lambda call: label_join(call.vector, call.texts),
    "label_replace": lambda call: label_replace(call.vector, call.texts),
    "scalar": _scalar,
    "vector": lambda call: [((), call.numbers[0])],
    "time": lambda call: call.time_s,
    "pi": lambda _: math.pi,
    "timestamp": _timestamp,
    "sort": lambda call: _sorted(call, descending=False),
    "sort_desc": lambda call: _sorted(call, descending=True),
}
FUNCTIONS: dict[str, Function] = {
    **{name: _over_windows(function) for name, function in OF_WINDOWS.items()},
    **{name: _elementwise(function) for name, function in _OF_NUMBERS.items()},
    **{name: _of_date(part) for name, part in dates.PARTS.items()},
    **_OTHERS,
}
OF_NOTHING_NOTHING = frozenset((*OF_WINDOWS, *_OF_NUMBERS, "histogram_quantile", "clamp_min", "clamp_max"))
"""Functions that make nothing of no series, and find nothing to complain of either."""
