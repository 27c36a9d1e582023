"""Binary operators on numbers and vectors, and the pairing of the elements of two vectors."""

import math
import operator as py
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sidecar.promql.arithmetic import divide, modulo, power
from sidecar.promql.values import PromqlError, Value, Vector, distinct, without_name
from sidecar.samples import Labels
from sidecar.store import NAME_LABEL


@dataclass(frozen=True, slots=True)
class Matching:
    """How elements of two vectors pair up.

    Attributes:
        on: Compare only `labels`; otherwise all labels but those and the metric name.
        cardinality: Which side may have several elements of a pairing; `many` for set operators.
        include: Labels that the result takes over from the side that has one.
    """

    on: bool = False
    labels: frozenset[str] = frozenset()
    cardinality: Literal["one", "left", "right", "many"] = "one"
    include: tuple[str, ...] = ()

    def key(self, labels: Labels) -> Labels:
        """Return the labels that have to be equal."""
        if self.on:
            return tuple([pair for pair in labels if pair[0] in self.labels])
        if labels and labels[0][0] == NAME_LABEL:
            labels = labels[1:]
        if not self.labels and (not labels or labels[0][0] > NAME_LABEL):
            return labels
        return tuple([pair for pair in labels if pair[0] not in self.labels and pair[0] != NAME_LABEL])


_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": py.add,
    "-": py.sub,
    "*": py.mul,
    "/": divide,
    "%": modulo,
    "^": power,
    "atan2": math.atan2,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": py.eq,
    "!=": py.ne,
    "<": py.lt,
    "<=": py.le,
    ">": py.gt,
    ">=": py.ge,
}
_SETS = frozenset({"and", "or", "unless"})
OPERATORS = frozenset({*_ARITHMETIC, *_COMPARISONS, *_SETS})


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator with its modifiers."""

    operator: str
    returns_bool: bool = False
    matching: Matching = Matching()

    @property
    def keeps_name(self) -> bool:
        """Whether the result is still the left metric: only a comparison that filters."""
        return self.operator in _COMPARISONS and not self.returns_bool

    def of_two(self) -> Callable[[float, float], float | None]:
        """Return the function of two numbers; it gives None when a filtering comparison does not hold."""
        if (arithmetic := _ARITHMETIC.get(self.operator)) is not None:
            return arithmetic
        compare = _COMPARISONS[self.operator]
        if self.returns_bool:
            return lambda left, right: float(compare(left, right))
        return lambda left, right: left if compare(left, right) else None


def combine(operation: Operation, left: Value, right: Value) -> float | Vector:
    """Apply an operator to two numbers, a number and a vector, or two vectors.

    Raises PromqlError when the elements of two vectors do not pair up as the operator demands.
    """
    assert isinstance(left, float | list)
    assert isinstance(right, float | list)
    if isinstance(left, float) and isinstance(right, float):
        value = operation.of_two()(left, right)
        assert value is not None, "the parser demands bool between numbers"
        return value
    if isinstance(left, list) and isinstance(right, list):
        return _set(operation, left, right) if operation.operator in _SETS else _paired(operation, left, right)
    if isinstance(left, list):
        assert isinstance(right, float)
        return _with_number(operation, left, right, number_is_left=False)
    assert isinstance(right, list)
    return _with_number(operation, right, left, number_is_left=True)


def _with_number(operation: Operation, elements: Vector, number: float, *, number_is_left: bool) -> Vector:
    """Apply to each element; a filtering comparison keeps the element's own value on whichever side it is."""
    of_two, keeps_name = operation.of_two(), operation.keeps_name
    vector: Vector = []
    for labels, value in elements:
        result = of_two(number, value) if number_is_left else of_two(value, number)
        if result is not None:
            vector.append((labels, value) if keeps_name else (without_name(labels), result))
    return vector if keeps_name else distinct(vector)


def _set(operation: Operation, left: Vector, right: Vector) -> Vector:
    key = operation.matching.key
    if operation.operator == "or":
        present = {key(labels) for labels, _ in left}
        return left + [element for element in right if key(element[0]) not in present]
    present = {key(labels) for labels, _ in right}
    return [element for element in left if (key(element[0]) in present) == (operation.operator == "and")]


def _paired(operation: Operation, left: Vector, right: Vector) -> Vector:
    """Pair each element of the side that may have many with the one of equal key on the other side."""
    if not left or not right:
        return []
    matching = operation.matching
    swapped = matching.cardinality == "right"
    many, one = (right, left) if swapped else (left, right)
    singles = _singles(one, matching)
    of_two = operation.of_two()
    results: dict[Labels, float] = {}
    used: set[Labels] = set()
    for labels, value in many:
        key = matching.key(labels)
        if (single := singles.get(key)) is None:
            continue
        result = of_two(single[1], value) if swapped else of_two(value, single[1])
        if result is None:
            continue
        if matching.cardinality == "one" and key in used:
            raise _ambiguous(key, "left", "add group_left() to allow that")
        used.add(key)
        identity = _result_labels(operation, labels, single[0])
        if identity in results:
            raise _ambiguous(identity, "result's", "match on more labels")
        results[identity] = result
    return list(results.items())


def _singles(one: Vector, matching: Matching) -> dict[Labels, tuple[Labels, float]]:
    """Return the elements of the side that has at most one for each key, by key."""
    singles: dict[Labels, tuple[Labels, float]] = {}
    for element in one:
        if singles.setdefault(key := matching.key(element[0]), element) is not element:
            side = "left" if matching.cardinality == "right" else "right"
            raise _ambiguous(key, side, "aggregate that side or match on more labels")
    return singles


def _result_labels(operation: Operation, many: Labels, one: Labels) -> Labels:
    matching = operation.matching
    labels = many if operation.keeps_name else without_name(many)
    if matching.cardinality == "one":
        if not matching.on and not matching.labels:
            return labels
        return tuple([pair for pair in labels if (pair[0] in matching.labels) == matching.on])
    if not matching.include:
        return labels
    merged = dict(labels)
    for label in matching.include:
        merged.pop(label, None)
    merged.update(pair for pair in one if pair[0] in matching.include)
    included = tuple(sorted(merged.items()))
    return without_name(included) if operation.returns_bool else included


def _ambiguous(labels: Labels, side: str, remedy: str) -> PromqlError:
    shown = ", ".join(f'{name}="{value}"' for name, value in labels)
    return PromqlError(f"several series on the {side} side match {{{shown}}}; {remedy}")
