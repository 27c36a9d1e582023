"""Aggregations over groups of an instant vector. A new one is a line in one of the tables."""

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal

from sidecar.promql import statistics
from sidecar.promql.values import PromqlError, Vector, with_label
from sidecar.samples import Labels
from sidecar.store import NAME_LABEL

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": statistics.total,
    "avg": statistics.mean,
    "min": statistics.smallest,
    "max": statistics.largest,
    "count": statistics.count,
    "group": statistics.one,
    "stdvar": statistics.variance_of_group,
    "stddev": statistics.deviation(statistics.variance_of_group),
}
SELECTIONS = frozenset({"topk", "bottomk"})
"""Aggregations that give elements of the vector as they are."""
AGGREGATIONS = frozenset({*REDUCTIONS, *SELECTIONS, "quantile", "count_values"})
INT64_LIMIT = 2.0**63


class Grouping:
    """Which elements belong together: those that agree in some labels, or in all but these when `without`."""

    def __init__(self, labels: frozenset[str], *, without: bool) -> None:
        self._labels = labels | {NAME_LABEL} if without else labels
        self._without = without

    def key(self, labels: Labels) -> Labels:
        """Return the labels that the group of an element has."""
        if self._without:
            return tuple([pair for pair in labels if pair[0] not in self._labels])
        return tuple([pair for pair in labels if pair[0] in self._labels]) if self._labels else ()

    def including(self, label: str) -> "Grouping":
        """Return the grouping under which elements that differ in one more label are apart."""
        return self if self._without else Grouping(self._labels | {label}, without=False)

    def groups(self, vector: Vector) -> Iterable[tuple[Labels, Vector]]:
        """Return the elements of each group."""
        if not self._labels:
            return [((), vector)] if vector else []
        groups: dict[Labels, Vector] = {}
        for element in vector:
            groups.setdefault(self.key(element[0]), []).append(element)
        return groups.items()


def aggregate(operator: str, vector: Vector, grouping: Grouping, parameter: float | str | None) -> Vector:
    """Reduce each group to one element, or to some of its own for `topk` and `bottomk`.

    Raises PromqlError when the number of elements asked for is no number.
    """
    if operator == "count_values":
        assert isinstance(parameter, str)
        return _count_values(vector, grouping, parameter)
    if operator in SELECTIONS:
        assert isinstance(parameter, float)
        return _extremes(vector, grouping, parameter, largest=operator == "topk")
    if operator == "quantile":
        assert isinstance(parameter, float)
        share = parameter
        return [
            (labels, statistics.quantile(share, [value for _, value in members]))
            for labels, members in grouping.groups(vector)
        ]
    reduce = REDUCTIONS[operator]
    return [(labels, reduce([value for _, value in members])) for labels, members in grouping.groups(vector)]


def _extremes(vector: Vector, grouping: Grouping, count: float, *, largest: bool) -> Vector:
    """Pick elements in order; NaN comes last. Of equal ones those whose labels sort first are picked."""
    if not vector or count < 1:
        return []
    if not -INT64_LIMIT <= count < INT64_LIMIT:
        raise PromqlError(f"{'topk' if largest else 'bottomk'}() of {count:g} elements; give a whole number")
    sign = -1 if largest else 1
    picked: Vector = []
    for _, members in grouping.groups(vector):
        ordered = sorted(members, key=lambda element: (math.isnan(element[1]), sign * element[1], element[0]))
        picked += ordered[: int(count)]
    return picked


def _count_values(vector: Vector, grouping: Grouping, label: str) -> Vector:
    """Count the elements of each value, which becomes a label."""
    valued = [(with_label(labels, label, _written(value)), value) for labels, value in vector]
    return [(labels, float(len(members))) for labels, members in grouping.including(label).groups(valued)]


def _written(value: float) -> str:
    """Write a number in the fewest digits that tell it from all others, without an exponent."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:+}".replace("inf", "Inf")
    text = format(Decimal(repr(value)), "f")
    return text.removesuffix(".0")
