"""Recent samples in memory, one compact series per name and label set, for the metric engine to read.

Samples of a series come in order of time, but for a clock that is set back: then what it said before is forgotten.
Times are kept as whole microseconds: differences of Unix times in float64 are only good to 1e-7 s, which is visible in
a rate. A series that ends is marked stale at a time instead of by a special NaN among its values, so that range
functions never need to filter. Counter resets are noted as they arrive (time, value lost), which makes `rate` over any
window cost a few look-ups instead of a pass over it. 16 bytes a sample, 16 more where the value fell.

Not thread-safe: one thread appends and evaluates.
"""

import functools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol

# google-re2 is the syntax and the linear running time that Prometheus has; it publishes no types.
import re2  # type: ignore[import-untyped]

from sidecar.samples import Labels, Sample

NAME_LABEL = "__name__"
MICROSECONDS_PER_S = 1_000_000

SeriesKey = tuple[str, Labels]
MatchOperator = Literal["=", "!=", "=~", "!~"]


CLOCK_STEP_US = 10 * MICROSECONDS_PER_S
"""A sample this much older than the newest of its series tells of a clock that was set back."""


def microseconds(time_s: float) -> int:
    """Round a time or a duration in seconds to whole microseconds."""
    return round(time_s * MICROSECONDS_PER_S)


class Matcher(NamedTuple):
    """One condition on one label; an absent label counts as empty. Patterns must match the whole value."""

    label: str
    operator: MatchOperator
    value: str

    def accepts(self, value: str) -> bool:
        """Tell whether a label value fulfils the condition."""
        if self.operator in {"=", "!="}:
            return (value == self.value) == (self.operator == "=")
        return matches_pattern(self.value, value) == (self.operator == "=~")


@functools.lru_cache(maxsize=4096)
def matches_pattern(pattern: str, value: str) -> bool:
    """Tell whether a pattern of RE2 syntax matches the whole value. Raises ValueError for a broken pattern."""
    options = re2.Options()
    options.dot_nl = True
    options.log_errors = False
    try:
        return re2.compile(pattern, options).fullmatch(value) is not None
    except re2.error as error:
        raise ValueError(f"pattern {pattern!r}: {error}") from error


class Series:
    """The samples of one series in time order, with the times at which it was declared stale."""

    __slots__ = ("identity", "labels", "lost_us", "lost_values", "name", "stale_us", "times_us", "values")

    def __init__(self, name: str, labels: Labels) -> None:
        self.name = name
        self.labels: Labels = tuple(pair for pair in labels if pair[1])
        self.identity: Labels = tuple(sorted(((NAME_LABEL, name), *self.labels)))
        self.times_us = array("q")
        self.values = array("d")
        self.lost_us = array("q")
        self.lost_values = array("d")
        self.stale_us = array("q")

    def append(self, time_us: int, value: float) -> bool:
        """Add a sample; False when it is not newer than the newest one, which then stays."""
        if self.times_us:
            if time_us <= self.times_us[-1]:
                return False
            previous = self.values[-1]
            if value < previous:
                self.lost_us.append(time_us)
                self.lost_values.append(previous)
        self.times_us.append(time_us)
        self.values.append(value)
        return True

    def mark_stale(self, time_us: int) -> None:
        """End the series at a time: instant look-ups at or after it find nothing until a newer sample comes."""
        if not self.stale_us or time_us > self.stale_us[-1]:
            self.stale_us.append(time_us)

    def newest(self, time_us: int, lookback_us: int) -> float | None:
        """Return the newest value at or before a time and younger than the look-back, unless it went stale since."""
        index = self.newest_index(time_us, lookback_us)
        return None if index is None else self.values[index]

    def newest_index(self, time_us: int, lookback_us: int) -> int | None:
        """Return where the sample is that `newest` gives the value of."""
        index = bisect_right(self.times_us, time_us) - 1
        if index < 0:
            return None
        sample_us = self.times_us[index]
        if sample_us <= time_us - lookback_us:
            return None
        if self.stale_us:
            marker = bisect_right(self.stale_us, time_us) - 1
            if marker >= 0 and self.stale_us[marker] >= sample_us:
                return None
        return index

    def span(self, start_us: int, end_us: int) -> tuple[int, int]:
        """Return the indices (first, end) of the samples with start < time <= end."""
        times_us = self.times_us
        first = bisect_right(times_us, start_us)
        # Nearly always the window ends after the newest sample.
        end = len(times_us)
        return first, end if end == 0 or times_us[-1] <= end_us else bisect_right(times_us, end_us)

    def losses(self, first_us: int, last_us: int) -> Sequence[float]:
        """Return the value before each fall of the series with first < time of the fall <= last."""
        if not self.lost_us:
            return self.lost_values
        return self.lost_values[bisect_right(self.lost_us, first_us) : bisect_right(self.lost_us, last_us)]

    def forget_after(self, time_us: int) -> None:
        """Drop everything newer than a time."""
        num_kept = bisect_right(self.times_us, time_us)
        del self.times_us[num_kept:], self.values[num_kept:]
        num_kept = bisect_right(self.lost_us, time_us)
        del self.lost_us[num_kept:], self.lost_values[num_kept:]
        del self.stale_us[bisect_right(self.stale_us, time_us) :]

    def forget_before(self, time_us: int) -> None:
        """Drop everything older than a time."""
        num_old = bisect_left(self.times_us, time_us)
        del self.times_us[:num_old], self.values[:num_old]
        num_old = bisect_left(self.lost_us, time_us)
        del self.lost_us[:num_old], self.lost_values[:num_old]
        del self.stale_us[: bisect_left(self.stale_us, time_us)]


class Grouping(Protocol):
    """Tells which labels the series of a group have in common; hashable."""

    def key(self, labels: Labels) -> Labels:
        """Return the labels that the group of a series has."""
        ...


Group = tuple[Labels, tuple[Series, ...]]


class Store:
    """All recent series.

    Attributes:
        window_s: Age in seconds, against the newest sample, up to which samples are kept; may be raised at any time.
        num_ignored: Samples that were not newer than the newest one of their series.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.num_ignored = 0
        self._series: dict[SeriesKey, Series] = {}
        self._by_name: dict[str, list[Series]] = {}
        self._selections: dict[tuple[Matcher, ...], tuple[Series, ...]] = {}
        self._groups: dict[tuple[tuple[Matcher, ...], Grouping], tuple[Group, ...]] = {}
        self._newest_us = 0
        self._next_sweep_us = 0

    def append(self, sample: Sample) -> None:
        """Add one sample; one that is not newer than the newest of its series is ignored and counted."""
        self.append_many((sample,))

    def append_many(self, samples: Iterable[Sample]) -> None:
        """Add samples in order."""
        last_s, time_us = float("nan"), 0
        for name, labels, time_s, value in samples:
            if time_s != last_s:  # many are of one time
                last_s, time_us = time_s, microseconds(time_s)
            series = self._series.get((name, labels))
            if series is None:
                series = self._create(name, labels)
            if series.times_us and time_us <= series.times_us[-1] - CLOCK_STEP_US:
                self._step_back(time_us)
            if not series.append(time_us, value):
                self.num_ignored += 1
            elif time_us > self._newest_us:
                self._newest_us = time_us
                if time_us >= self._next_sweep_us:
                    self._sweep()

    def mark_stale(self, keys: Iterable[SeriesKey], time_s: float) -> None:
        """End the series with these keys at a time in Unix seconds; unknown keys are ignored."""
        for key in keys:
            if series := self._series.get(key):
                series.mark_stale(microseconds(time_s))

    def select(self, matchers: tuple[Matcher, ...]) -> tuple[Series, ...]:
        """Return the series that fulfil every matcher; the metric name is the label `__name__`.

        They come in the order of their labels, so that no sum depends on which series was there first.
        """
        selected = self._selections.get(matchers)
        if selected is None:
            name = next((m.value for m in matchers if m.label == NAME_LABEL and m.operator == "="), None)
            candidates = self._series.values() if name is None else self._by_name.get(name, ())
            fulfilling = [series for series in candidates if _fulfils(series, matchers)]
            selected = tuple(sorted(fulfilling, key=attrgetter("identity")))
            self._selections[matchers] = selected
        return selected

    def select_groups(self, matchers: tuple[Matcher, ...], grouping: Grouping) -> tuple[Group, ...]:
        """Return the selected series by the labels that they have in common, found once for all evaluations."""
        groups = self._groups.get((matchers, grouping))
        if groups is None:
            members: dict[Labels, list[Series]] = {}
            for series in self.select(matchers):
                members.setdefault(grouping.key(series.labels), []).append(series)
            groups = tuple((labels, tuple(series)) for labels, series in members.items())
            self._groups[matchers, grouping] = groups
        return groups

    def names(self) -> frozenset[str]:
        """Return the metric names that have a series now."""
        return frozenset(self._by_name)

    def keys(self) -> tuple[SeriesKey, ...]:
        """Return the key of every series held now."""
        return tuple(self._series)

    def _create(self, name: str, labels: Labels) -> Series:
        series = self._series[name, labels] = Series(name, labels)
        self._by_name.setdefault(name, []).append(series)
        self._forget_selections()
        return series

    def _forget_selections(self) -> None:
        self._selections.clear()
        self._groups.clear()

    def _step_back(self, time_us: int) -> None:
        """Forget what lies in the future of a clock that was set back: new samples would count for nothing."""
        for series in self._series.values():
            series.forget_after(time_us)
        self._newest_us = time_us
        self._next_sweep_us = time_us + microseconds(self.window_s) // 4

    def _sweep(self) -> None:
        """Drop old samples everywhere, and series without any; four times per window, so memory is at most 5/4."""
        window_us = microseconds(self.window_s)
        self._next_sweep_us = self._newest_us + window_us // 4
        for key, series in list(self._series.items()):
            series.forget_before(self._newest_us - window_us)
            if not series.times_us:
                del self._series[key]
                self._by_name[series.name].remove(series)
                self._forget_selections()
        self._by_name = {name: members for name, members in self._by_name.items() if members}


def _fulfils(series: Series, matchers: tuple[Matcher, ...]) -> bool:
    values = dict(series.identity)
    return all(matcher.accepts(values.get(matcher.label, "")) for matcher in matchers)
