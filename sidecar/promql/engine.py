"""Evaluates a syntax tree at one time, over the samples in a store, with the semantics of Prometheus 3.

Windows are open on the left, an instant look-up reaches back five minutes, a stale series is absent at once.
"""

from sidecar.promql.aggregations import Grouping, aggregate
from sidecar.promql.functions import FUNCTIONS, Invocation
from sidecar.promql.nodes import Aggregation, Binary, Call, Negation, Node, Number, Selector, Text, walk
from sidecar.promql.operators import combine
from sidecar.promql.syntax import parse
from sidecar.promql.values import Interval, Matrix, PromqlError, Value, Vector, distinct, without_name
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
    value: Value
    match node:
        case Number() | Text():
            value = node.value
        case Selector():
            value = _selected(node, store, time_s)
        case Negation(operand):
            value = _negated(_value(operand, store, time_s))
        case Binary(operation, left, right):
            value = combine(operation, _value(left, store, time_s), _value(right, store, time_s))
        case Aggregation():
            value = _aggregated(node, store, time_s)
        case Call("timestamp", (Selector() as selector,)):
            value = _sample_times(selector, store, time_s)
        case Call(function, arguments):
            values = [_value(argument, store, time_s) for argument in arguments]
            value = FUNCTIONS[function](Invocation(values, arguments, time_s))
    return value


def _selected(selector: Selector, store: Store, time_s: float) -> Value:
    if selector.range_us is not None:
        return _windows(selector, selector.range_us, store, microseconds(time_s))
    time_us = microseconds(time_s) - selector.offset_us
    vector: Vector = []
    for series in store.select(selector.matchers):
        index = series.newest_index(time_us, _LOOKBACK_US)
        if index is not None:
            vector.append((series.identity, series.values[index]))
    return vector


def _sample_times(selector: Selector, store: Store, time_s: float) -> Vector:
    time_us = microseconds(time_s) - selector.offset_us
    vector: Vector = []
    for series in store.select(selector.matchers):
        index = series.newest_index(time_us, _LOOKBACK_US)
        if index is not None:
            vector.append((series.labels, series.times_us[index] / MICROSECONDS_PER_S))
    return distinct(vector)


def _windows(selector: Selector, range_us: int, store: Store, time_us: int) -> Matrix:
    end_us = time_us - selector.offset_us
    interval = Interval(end_us - range_us, end_us, time_us)
    spans = []
    for series in store.select(selector.matchers):
        first, end = series.span(interval.start_us, interval.end_us)
        if first < end:
            spans.append((series, first, end))
    return Matrix(spans, interval, of_one_name=selector.name is not None)


def _aggregated(node: Aggregation, store: Store, time_s: float) -> Vector:
    parameter = None if node.parameter is None else _value(node.parameter, store, time_s)
    vector = _value(node.operand, store, time_s)
    assert isinstance(vector, list)
    assert parameter is None or isinstance(parameter, float | str)
    return aggregate(node.operator, vector, Grouping(node.labels, without=node.without), parameter)


def _negated(value: Value) -> Value:
    if isinstance(value, float):
        return -value
    assert isinstance(value, list)
    return distinct([(without_name(labels), -number) for labels, number in value])
