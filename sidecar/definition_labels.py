"""Which labels the result of an expression can have at most, worked out from those of the raw families.

`None` stands for anything: a series that is not known, or a construct that makes labels out of data.
"""

from collections.abc import Mapping

from sidecar.catalogue import Exposed
from sidecar.promql.operators import Operation
from sidecar.promql.syntax import Aggregation, Binary, Call, Negation, Node, Number, Selector, Text
from sidecar.store import NAME_LABEL

PossibleLabels = frozenset[str] | None

OF_BUCKETS = frozenset({"histogram_quantile", "histogram_fraction"})
"""Functions that make one value of all buckets of a histogram, which come last among their arguments."""

_WITHOUT_LABELS = frozenset({"scalar", "time", "vector", "pi"})
_OF_MATCHERS = frozenset({"absent", "absent_over_time"})
_ADDS_LABEL = frozenset({"label_replace", "label_join"})
_KEEPS_ELEMENTS = frozenset({"topk", "bottomk", "limitk", "limit_ratio"})


def accepted_names(selector: Selector, series: Mapping[str, Exposed]) -> list[str]:
    """The known series names that a selector accepts."""
    if selector.name is not None:
        return [selector.name] if selector.name in series else []
    conditions = [matcher for matcher in selector.matchers if matcher.label == NAME_LABEL]
    return [name for name in series if all(condition.accepts(name) for condition in conditions)]


def labels_of_selector(selector: Selector, series: Mapping[str, Exposed]) -> PossibleLabels:
    """The labels that the series of a selector can have."""
    names = accepted_names(selector, series)
    return frozenset().union(*(series[name].labels for name in names)) if names else None


def possible_labels(node: Node, series: Mapping[str, Exposed]) -> PossibleLabels:
    """The labels that the result of an expression can have at most."""
    match node:
        case Number() | Text():
            return frozenset()
        case Selector():
            return labels_of_selector(node, series)
        case Negation(operand=operand):
            return possible_labels(operand, series)
        case Aggregation():
            return _of_aggregation(node, series)
        case Binary(operation=operation, left=left, right=right):
            return _of_binary(operation, possible_labels(left, series), possible_labels(right, series), node)
        case Call():
            return _of_call(node, series)


def is_scalar(node: Node) -> bool:
    """Whether an expression gives a number, as far as its outermost construct tells."""
    match node:
        case Number():
            return True
        case Call(function=function):
            return function in {"scalar", "time", "pi"}
        case Negation(operand=operand):
            return is_scalar(operand)
        case Binary(left=left, right=right):
            return is_scalar(left) and is_scalar(right)
        case _:
            return False


def _of_aggregation(node: Aggregation, series: Mapping[str, Exposed]) -> PossibleLabels:
    kept = possible_labels(node.operand, series)
    if node.operator in _KEEPS_ELEMENTS:
        return kept
    if node.operator == "count_values":
        return None
    if node.without:
        return None if kept is None else kept - node.labels
    return node.labels if kept is None else kept & node.labels


def _of_binary(operation: Operation, left: PossibleLabels, right: PossibleLabels, node: Binary) -> PossibleLabels:
    if is_scalar(node.left) or is_scalar(node.right):
        return right if is_scalar(node.left) else left
    matching = operation.matching
    if operation.operator == "or":
        return None if left is None or right is None else left | right
    many = right if matching.cardinality == "right" else left
    if operation.operator in {"and", "unless"}:
        return left
    if matching.cardinality != "one":
        return None if many is None else many | frozenset(matching.include)
    if matching.on:
        return matching.labels if many is None else many & matching.labels
    return None if many is None else many - matching.labels


def _of_call(node: Call, series: Mapping[str, Exposed]) -> PossibleLabels:
    if node.function in _WITHOUT_LABELS:
        return frozenset()
    if node.function in _OF_MATCHERS:
        argument = node.arguments[0]
        return frozenset(m.label for m in argument.matchers) if isinstance(argument, Selector) else frozenset()
    kept: frozenset[str] = frozenset()
    for argument in node.arguments:
        labels = possible_labels(argument, series)
        if labels is None:
            return None
        kept |= labels
    if node.function in _ADDS_LABEL and len(node.arguments) > 1 and isinstance(node.arguments[1], Text):
        return kept | {node.arguments[1].value}
    return kept - {"le"} if node.function in OF_BUCKETS else kept
