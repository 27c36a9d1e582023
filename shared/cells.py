"""The counters of a trainer: one flat float64 array, each cell written by exactly one thread.

An update is `values[i] += x` on a plain `array`: no lock, no allocation, no call out of Python. That is safe because
every cell has a single writer and the only reader, the telemetry thread, copies the whole array in one bytecode under
the GIL. Declaring series is not thread-safe: declare them all before the workers start, then take the schema.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from shared.schema import Family, Schema, Series


class Counter:
    """A cumulative value. Only the thread that owns it may call `add`."""

    __slots__ = ("_index", "_values")

    def __init__(self, values: "array[float]", index: int) -> None:
        self._values = values
        self._index = index

    def add(self, amount: float = 1.0) -> None:
        """Add `amount` (>= 0)."""
        self._values[self._index] += amount

    def mirror(self, total: float) -> None:
        """Replace the total by one that is kept elsewhere (a queue, the allocator); it must never decrease."""
        self._values[self._index] = total

    @property
    def value(self) -> float:
        """The current total; any thread may read it."""
        return self._values[self._index]


class Gauge:
    """A value that goes up and down. Only the thread that owns it may call `set`."""

    __slots__ = ("_index", "_values")

    def __init__(self, values: "array[float]", index: int) -> None:
        self._values = values
        self._index = index

    def set(self, value: float) -> None:
        """Replace the value."""
        self._values[self._index] = value


class Histogram:
    """Counts per bucket and a sum. Only the thread that owns it may call `observe`."""

    __slots__ = ("_bounds", "_index", "_values")

    def __init__(self, values: "array[float]", index: int, bounds: tuple[float, ...]) -> None:
        self._values = values
        self._index = index
        self._bounds = bounds

    def observe(self, value: float) -> None:
        """Count `value` in the first bucket whose upper bound is not below it."""
        self._values[self._index + bisect_left(self._bounds, value)] += 1.0
        self._values[self._index + len(self._bounds) + 1] += value


class Cells:
    """Declare series, hand out their writers, and copy all values at once.

    Args:
        families: the catalogue that series may be declared from; unknown names raise KeyError.
    """

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = {family.name: (index, family) for index, family in enumerate(families)}
        self._series: list[Series] = []
        self._values: array[float] = array("d")

    def counter(self, name: str, **labels: str) -> Counter:
        """Declare a counter series."""
        return Counter(self._values, self._declare(name, "counter", labels))

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Declare a gauge series."""
        return Gauge(self._values, self._declare(name, "gauge", labels))

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Declare a histogram series over the family's bucket bounds."""
        index = self._declare(name, "histogram", labels)
        return Histogram(self._values, index, self._families[name][1].buckets)

    def schema(self) -> Schema:
        """The schema of everything declared so far."""
        return Schema(families=tuple(family for _, family in self._families.values()), series=tuple(self._series))

    def snapshot(self) -> bytes:
        """Copy every value as little-endian float64, in schema order. Safe from any thread."""
        return self._values.tobytes()

    def _declare(self, name: str, kind: str, labels: dict[str, str]) -> int:
        position, family = self._families[name]
        if family.kind != kind or set(labels) != set(family.labels):
            raise ValueError(f"{name} is a {family.kind} with labels {family.labels}, not a {kind} with {set(labels)}")
        series = Series(family=position, labels=tuple(labels[label] for label in family.labels))
        if series in self._series:
            raise ValueError(f"{name}{labels} is declared twice: every cell has one writer")
        index = len(self._values)
        self._series.append(series)
        self._values.extend([0.0] * family.cells_per_series)
        return index
