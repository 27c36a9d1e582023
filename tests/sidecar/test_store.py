"""The store keeps what is recent, finds it by matchers, and knows when a series ended."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.promql.aggregations import Grouping
from sidecar.samples import Sample, labels_of
from sidecar.store import Matcher, Series, Store, matches_pattern, microseconds

START_S = 1_700_000_000.0


def store_of(*samples: tuple[str, dict[str, str], float, float]) -> Store:
    """A store with samples (name, labels, seconds after the start, value)."""
    store = Store(window_s=600)
    store.append_many(Sample(name, labels_of(**labels), START_S + at, value) for name, labels, at, value in samples)
    return store


def names_selected(store: Store, *matchers: Matcher) -> list[str]:
    """Identify the selected series by their label `id`."""
    return sorted(dict(series.labels)["id"] for series in store.select(matchers))


class TestSelect:
    """Selection by matchers."""

    @pytest.mark.parametrize(
        ("matcher", "expected"),
        [
            (Matcher("role", "=", "target"), ["1", "2"]),
            (Matcher("role", "!=", "target"), ["3", "4"]),
            (Matcher("role", "=~", "tar.*|x"), ["1", "2"]),
            (Matcher("role", "=~", "arge"), []),
            (Matcher("role", "!~", "target|drafter"), ["4"]),
            (Matcher("role", "=", ""), ["4"]),
            (Matcher("role", "=~", ".*"), ["1", "2", "3", "4"]),
            (Matcher("role", "=~", ".+"), ["1", "2", "3"]),
            (Matcher("__name__", "=", "b"), ["2"]),
            (Matcher("__name__", "!~", "a|b"), ["4"]),
        ],
    )
    def test_matchers(self, matcher: Matcher, expected: list[str]) -> None:
        """A matcher sees the whole value, and an absent label as an empty one."""
        store = store_of(
            ("a", {"id": "1", "role": "target"}, 0, 1),
            ("b", {"id": "2", "role": "target"}, 0, 1),
            ("a", {"id": "3", "role": "drafter"}, 0, 1),
            ("c", {"id": "4"}, 0, 1),
        )

        assert names_selected(store, matcher) == expected

    def test_a_new_series_is_selected_at_once(self) -> None:
        """A remembered selection does not hide a series that came later."""
        store = store_of(("a", {"id": "1"}, 0, 1))
        before = names_selected(store, Matcher("__name__", "=", "a"))
        store.append(Sample("a", labels_of(id="2"), START_S, 1.0))

        assert (before, names_selected(store, Matcher("__name__", "=", "a"))) == (["1"], ["1", "2"])

    def test_groups_follow_the_series(self) -> None:
        """Series that share labels are found together, one that came later and one that went included."""
        store = store_of(("a", {"id": "1", "role": "x"}, 0, 1), ("a", {"id": "2", "role": "x"}, 0, 1))
        matchers, grouping = (Matcher("__name__", "=", "a"),), Grouping(frozenset({"role"}), without=False)
        sizes = [[len(members) for _, members in store.select_groups(matchers, grouping)]]
        store.append(Sample("a", labels_of(id="3", role="y"), START_S + 100_000, 1.0))
        sizes.append([len(members) for _, members in store.select_groups(matchers, grouping)])

        assert sizes == [[2], [1]]
        assert [labels for labels, _ in store.select_groups(matchers, grouping)] == [(("role", "y"),)]

    def test_empty_labels_are_no_labels(self) -> None:
        """A label with an empty value is left out of a series, as in Prometheus."""
        store = store_of(("a", {"id": "1", "role": ""}, 0, 1))

        assert [series.labels for series in store.select(())] == [(("id", "1"),)]


def test_a_pattern_with_a_newline_matches_as_in_prometheus() -> None:
    """The dot matches a newline."""
    assert matches_pattern("a.b", "a\nb")


def test_a_hostile_pattern_is_cheap() -> None:
    """A pattern that takes a backtracking matcher years is answered at once."""
    assert not matches_pattern("(a|a)*(b|b)*c", "ab" * 120)


def test_a_broken_pattern_is_named() -> None:
    """A pattern outside RE2's syntax is refused with its text."""
    with pytest.raises(ValueError, match=r"pattern '\(\?=a\)'"):
        matches_pattern("(?=a)", "a")


class TestAppend:
    """Order and retention."""

    def test_old_and_equal_times_are_ignored_and_counted(self) -> None:
        """A sample that is not newer than the newest of its series changes nothing but a count."""
        store = store_of(("a", {}, 2, 1), ("a", {}, 1, 7), ("a", {}, 2, 8), ("a", {}, 3, 2), ("b", {}, 1, 5))

        assert (store.select(())[0].values.tolist(), store.num_ignored) == ([1.0, 2.0], 2)

    def test_what_is_older_than_the_window_is_dropped(self) -> None:
        """After a long time a store holds one window and at most a quarter more."""
        store = Store(window_s=100)
        for second in range(1000):
            store.append(Sample("a", (), START_S + second, 1.0))

        assert 100 <= len(store.select(())[0].values) <= 126

    def test_a_series_without_recent_samples_vanishes(self) -> None:
        """A series nobody writes any more is forgotten, its name too."""
        store = store_of(("old", {}, 0, 1))
        for second in range(0, 2000, 10):
            store.append(Sample("new", (), START_S + second, 1.0))

        assert (store.names(), store.keys(), len(store.select(()))) == ({"new"}, (("new", ()),), 1)


class TestStaleness:
    """The end of a series."""

    @pytest.mark.parametrize(
        ("at", "expected"), [(9, None), (10, 1.0), (14, 1.0), (15, None), (19, None), (20, 2.0), (320, None)]
    )
    def test_a_stale_series_is_absent_until_it_returns(self, at: float, expected: float | None) -> None:
        """Sample at 10, end at 15, sample at 20, and the look-back is open on the left."""
        store = store_of(("a", {}, 10, 1), ("a", {}, 20, 2))
        store.mark_stale([("a", ()), ("unknown", ())], START_S + 15)

        assert store.select(())[0].newest(microseconds(START_S + at), microseconds(300)) == expected

    def test_a_series_that_ends_at_its_last_sample_is_absent(self) -> None:
        """A marker at the very time of a sample hides it."""
        store = store_of(("a", {}, 10, 1))
        store.mark_stale([("a", ())], START_S + 10)

        assert store.select(())[0].newest(microseconds(START_S + 10), microseconds(300)) is None


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, 5), st.floats(0, 100)), min_size=1),
    first=st.integers(0, 50),
    length=st.integers(1, 60),
    forgotten=st.integers(0, 60),
)
def test_spans_and_losses_agree_with_a_pass_over_all(
    steps: list[tuple[int, float]], first: int, length: int, forgotten: int
) -> None:
    """The samples of a window and the falls between them are those a plain pass finds, also after forgetting some."""
    series = Series("a", ())
    samples: list[tuple[int, float]] = []
    for gap, value in steps:
        samples.append((samples[-1][0] + gap if samples else 0, value))
        series.append(*samples[-1])
    series.forget_before(forgotten)
    window = [(t, v) for t, v in samples if first < t <= first + length and t >= forgotten]
    falls = [before for (_, before), (_, after) in pairwise(window) if after < before]
    start, end = series.span(first, first + length)

    assert series.values[start:end].tolist() == [value for _, value in window]
    if window:
        assert list(series.losses(window[0][0], window[-1][0])) == falls


class TestClock:
    """A clock that is set back."""

    def test_new_samples_count_at_once(self) -> None:
        """What lies in the future is forgotten in every series; what follows is found, and fell by nothing."""
        store = store_of(("a", {}, 0, 1), ("a", {}, 10_800, 5), ("b", {}, 10_800, 3))
        store.append_many(Sample("a", (), START_S + at, value) for at, value in ((7.0, 6.0), (8.0, 7.0)))
        a, b = (store.select((Matcher("__name__", "=", name),))[0] for name in "ab")

        assert a.newest(microseconds(START_S + 8), microseconds(5)) == 7.0
        assert a.losses(0, microseconds(START_S + 20_000)).tolist() == []
        assert len(b.times_us) == 0

    def test_memory_stays_bounded(self) -> None:
        """After the step the window moves on with the new time, as before."""
        store = store_of(("a", {}, 10_800, 1))
        store.append_many(Sample("a", (), START_S + at, 1.0) for at in range(5_000))

        assert len(store.select((Matcher("__name__", "=", "a"),))[0].times_us) < 1.3 * 600

    def test_a_little_disorder_is_no_step(self) -> None:
        """A sample that is late by seconds is ignored and takes nothing away."""
        store = store_of(("a", {}, 0, 1), ("a", {}, 9, 2), ("a", {}, 0, 3))

        assert store.select(())[0].values.tolist() == [1.0, 2.0]
        assert store.num_ignored == 1
