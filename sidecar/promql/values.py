"""What expressions evaluate to: a number, a string, an instant vector, or windows of samples."""

from collections.abc import Sequence
from typing import NamedTuple

from sidecar.samples import Labels
from sidecar.store import MICROSECONDS_PER_S, NAME_LABEL, Series

Vector = list[tuple[Labels, float]]
"""Values by label set. The metric name, where there is one, is the label `__name__`."""


class PromqlError(ValueError):
    """An expression that cannot be accepted or evaluated; `token` is the part of its text to look at, if known."""

    def __init__(self, message: str, token: str = "") -> None:
        super().__init__(message)
        self.token = token


class Window(NamedTuple):
    """The samples `first` to `end - 1` of a series: those with start < time <= end of the window. Never empty."""

    series: Series
    first: int
    end: int
    start_us: int
    end_us: int

    @property
    def values(self) -> Sequence[float]:
        """The values in time order, as a copy."""
        return self.series.values[self.first : self.end]

    @property
    def range_s(self) -> float:
        """Length of the window in seconds, whether or not samples fill it."""
        return (self.end_us - self.start_us) / MICROSECONDS_PER_S


class Matrix(NamedTuple):
    """One window per series."""

    windows: list[Window]


Value = float | str | Vector | Matrix


def without_name(labels: Labels) -> Labels:
    """Return the labels without the metric name."""
    return tuple(pair for pair in labels if pair[0] != NAME_LABEL)


def distinct(vector: Vector) -> Vector:
    """Return the vector. Raises PromqlError when two of its elements have the same labels."""
    if len({labels for labels, _ in vector}) != len(vector):
        raise PromqlError("the result has several series with the same labels; aggregate them, or select one name")
    return vector
