"""Aggregations over groups of an instant vector. A new one is a line in `AGGREGATIONS`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sidecar.promql import statistics
from sidecar.promql.values import Vector
from sidecar.store import NAME_LABEL

if TYPE_CHECKING:
    from sidecar.samples import Labels

AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": statistics.total,
    "avg": statistics.mean,
    "min": statistics.smallest,
    "max": statistics.largest,
    "count": statistics.count,
}


def aggregate(operator: str, vector: Vector, labels: frozenset[str], *, without: bool) -> Vector:
    """Reduce each group of elements that agree in `labels`, or in all but `labels` and the name when `without`."""
    dropped = labels | {NAME_LABEL}
    groups: dict[Labels, list[float]] = {}
    for element, value in vector:
        if without:
            group = tuple(pair for pair in element if pair[0] not in dropped)
        else:
            group = tuple(pair for pair in element if pair[0] in labels) if labels else ()
        groups.setdefault(group, []).append(value)
    reduce = AGGREGATIONS[operator]
    return [(group, reduce(values)) for group, values in groups.items()]
