"""Evaluates a syntax tree at one time, over the samples in a store, with the semantics of Prometheus 3.

Windows are open on the left, an instant look-up reaches back five minutes, a stale series is absent at once.
"""

from sidecar.promql.aggregations import aggregate
from sidecar.promql.functions import FUNCTIONS
from sidecar.promql.operators import combine
from sidecar.promql.syntax import Aggregation, Binary, Call, Negation, Node, Number, Selector, Text, parse, walk
from sidecar.promql.values import Matrix, PromqlError, Value, Vector, Window, distinct, without_name
from sidecar.store import MICROSECONDS_PER_S, Store, microseconds

LOOKBACK_S = 300.0
_LOOKBACK_US = microseconds(LOOKBACK_S)


def evaluate(expression: Node | str, store: Store, time_s: float) -> float | Vector:
    """Evaluate an expression as an instant query.

    Args:
        expression: A parsed expression, or its text.
        store: The samples; those after `time_s` are not seen.
        time_s: Unix seconds.

    Returns:
        A number, or values by label set; the metric name is the label `__name__` where Prometheus keeps it.

    Raises:
        PromqlError: The text is not accepted, series do not match one to one, or the result is no number or vector.
    """
    node = parse(expression) if isinstance(expression, str) else expression
    value = _value(node, store, float(time_s))
    if isinstance(value, str | Matrix):
        raise PromqlError("the expression gives a string or a range of samples; it must give a number or a vector")
    return value


def history_needed_s(node: Node) -> float:
    """Return how far back an expression looks, in seconds before the time it is evaluated at."""
    selectors = [part for part in walk(node) if isinstance(part, Selector)]
    return max(((s.range_us or _LOOKBACK_US) + s.offset_us for s in selectors), default=0) / MICROSECONDS_PER_S


def _value(node: Node, store: Store, time_s: float) -> Value:
    match node:
        case Number(value) | Text(value):
            return value
        case Selector():
            return _selected(node, store, time_s)
        case Negation(operand):
            return _negated(_value(operand, store, time_s))
        case Binary(operation, left, right):
            return combine(operation, _value(left, store, time_s), _value(right, store, time_s))
        case Aggregation(operator, operand, labels, without):
            vector = _value(operand, store, time_s)
            assert isinstance(vector, list)
            return aggregate(operator, vector, labels, without=without)
        case Call(function, arguments):
            return FUNCTIONS[function]([_value(argument, store, time_s) for argument in arguments], time_s)


def _selected(selector: Selector, store: Store, time_s: float) -> Value:
    time_us = microseconds(time_s) - selector.offset_us
    if selector.range_us is not None:
        return _windows(selector, store, time_us - selector.range_us, time_us)
    vector: Vector = []
    for series in store.select(selector.matchers):
        value = series.newest(time_us, _LOOKBACK_US)
        if value is not None:
            vector.append((series.identity, value))
    return vector


def _windows(selector: Selector, store: Store, start_us: int, end_us: int) -> Matrix:
    windows = []
    for series in store.select(selector.matchers):
        first, end = series.span(start_us, end_us)
        if first < end:
            windows.append(Window(series, first, end, start_us, end_us))
    return Matrix(windows)


def _negated(value: Value) -> Value:
    if isinstance(value, float):
        return -value
    assert isinstance(value, list)
    return distinct([(without_name(labels), -number) for labels, number in value])
