"""What expressions evaluate to: a number, a string, an instant vector, or windows of samples."""

from typing import NamedTuple

from sidecar.samples import Labels
from sidecar.store import NAME_LABEL, Series

METADATA_LABELS = frozenset({NAME_LABEL, "__type__", "__unit__"})
"""Labels that say what a value is, and go when an operation makes something else of it."""
_LAST_METADATA_LABEL = max(METADATA_LABELS)

Vector = list[tuple[Labels, float]]
"""Values by label set. The metric name, where there is one, is the label `__name__`."""


class PromqlError(ValueError):
    """An expression that cannot be accepted or evaluated; `token` is the part of its text to look at, if known."""

    def __init__(self, message: str, token: str = "") -> None:
        super().__init__(message)
        self.token = token


class Interval(NamedTuple):
    """The times that a range selector looks at, start < time <= end, and the time at which it is evaluated."""

    start_us: int
    end_us: int
    time_us: int


Span = tuple[Series, int, int]
"""The samples `first` to `end - 1` of a series: those inside an interval, at least one."""


class Matrix(NamedTuple):
    """The samples of each series in an interval; `of_one_name` when all series have the same metric name."""

    spans: list[Span]
    interval: Interval
    of_one_name: bool


Value = float | str | Vector | Matrix


def without_name(labels: Labels) -> Labels:
    """Return the labels without the metric name, and without type and unit."""
    if labels and labels[0][0] == NAME_LABEL:
        # The usual case: the name is the first label, and no other of the kind follows.
        labels = labels[1:]
    if not labels or labels[0][0] > _LAST_METADATA_LABEL:
        return labels
    return tuple(pair for pair in labels if pair[0] not in METADATA_LABELS)


def distinct(vector: Vector) -> Vector:
    """Return the vector. Raises PromqlError when two of its elements have the same labels."""
    if len(vector) > 1 and len({labels for labels, _ in vector}) != len(vector):
        raise PromqlError("the result has several series with the same labels; aggregate them, or select one name")
    return vector


def with_label(labels: Labels, name: str, value: str) -> Labels:
    """Return the labels with one of them set, or removed when the value is empty."""
    changed = dict(labels)
    changed.pop(name, None)
    if value:
        changed[name] = value
    return tuple(sorted(changed.items()))
