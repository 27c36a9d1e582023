"""Values worked out by hand, and laws that hold for all samples. test_promql_oracle.py compares with the original."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.promql.engine import evaluate, history_needed_s
from sidecar.promql.syntax import parse
from sidecar.promql.values import PromqlError
from sidecar.samples import Labels, Sample, labels_of
from sidecar.store import Store

START_S = 1_700_000_000.0


def store_of(*series: tuple[str, dict[str, str], dict[float, float]]) -> Store:
    """A store with series (name, labels, value by seconds after the start)."""
    store = Store(window_s=3600)
    for name, labels, values in series:
        store.append_many(Sample(name, labels_of(**labels), START_S + at, value) for at, value in values.items())
    return store


def values_of(expression: str, store: Store, at: float) -> dict[Labels, float]:
    """Evaluate to values by labels."""
    vector = evaluate(expression, store, START_S + at)
    assert isinstance(vector, list)
    return dict(vector)


class TestRate:
    """Counters and gauges over windows."""

    @pytest.mark.parametrize(
        ("values", "expression", "expected"),
        [
            # 20 to 50 in 30 s; both edges are 5 s away, less than 1.1 sample distances: 30 * (30 + 5 + 5) / 30.
            ({25: 20, 35: 30, 45: 40, 55: 50}, "increase(c[40s])", 40),
            ({25: 20, 35: 30, 45: 40, 55: 50}, "rate(c[40s])", 1),
            # The start is 25 s away, more than 11 s: half a distance there. 30 * (30 + 5 + 5) / 30 over a minute.
            ({25: 20, 35: 30, 45: 40, 55: 50}, "increase(c[1m])", 40),
            # From 1 the counter was at zero 10 / 3 s before its first sample: 6 * (20 + 10/3 + 5) / 20.
            ({35: 1, 45: 4, 55: 7}, "increase(c[35s])", 8.5),
            # Falls to 5 at 45: 5 - 20 + 30 gained, so 15 in 20 s, edges at 5 s: 15 * 30 / 20.
            ({35: 20, 45: 30, 55: 5}, "increase(c[30s])", 22.5),
            # A gauge may fall and go below zero: -9 * 30 / 20.
            ({35: 1, 45: 4, 55: -8}, "delta(c[30s])", -13.5),
            ({35: 20, 45: 30, 55: 36}, "irate(c[30s])", 0.6),
            ({35: 20, 45: 30, 55: 6}, "irate(c[30s])", 0.6),
        ],
    )
    def test_by_hand(self, values: dict[float, float], expression: str, expected: float) -> None:
        """Rates are extrapolated as Prometheus does, evaluated at 60 s."""
        assert values_of(expression, store_of(("c", {}, values)), 60) == {(): pytest.approx(expected, rel=1e-12)}

    def test_a_window_is_open_on_the_left(self) -> None:
        """A sample exactly one range old is outside, one at the evaluation time inside."""
        store = store_of(("c", {}, {30: 1, 40: 2, 50: 4, 60: 8}))

        assert values_of("sum_over_time(c[30s])", store, 60) == {(): 14}

    def test_one_sample_has_no_rate(self) -> None:
        """A window with a single sample gives no element."""
        assert values_of("rate(c[15s])", store_of(("c", {}, {50: 1, 59: 2})), 60) != {}
        assert values_of("rate(c[5s])", store_of(("c", {}, {50: 1, 59: 2})), 60) == {}

    def test_samples_after_the_time_are_not_seen(self) -> None:
        """An evaluation at a past time gives what it gave then."""
        store = store_of(("c", {}, {10: 1, 20: 2, 30: 100}))

        assert values_of("c", store, 25) == {(("__name__", "c"),): 2}
        assert values_of("max_over_time(c[1m])", store, 25) == {(): 2}

    def test_stale_series_leave_the_instant_but_not_the_window(self) -> None:
        """After its end a series is gone from instant selections, and its window runs out by itself."""
        store = store_of(("c", {}, {10: 1, 20: 2}))
        store.mark_stale([("c", ())], START_S + 25)

        assert values_of("c", store, 26) == {}
        assert values_of("count_over_time(c[30s])", store, 26) == {(): 2}


class TestVectors:
    """Labels of results."""

    STORE = store_of(
        ("depth", {"queue": "a", "worker": "0"}, {1: 4}),
        ("depth", {"queue": "a", "worker": "1"}, {1: 6}),
        ("depth", {"queue": "b", "worker": "0"}, {1: 9}),
        ("room", {"queue": "a"}, {1: 2}),
        ("room", {"queue": "b"}, {1: 3}),
    )

    @pytest.mark.parametrize(
        ("expression", "expected"),
        [
            ("sum by (queue) (depth)", {"a": 10, "b": 9}),
            ("avg without (worker) (depth)", {"a": 5, "b": 9}),
            ("count by (queue) (depth)", {"a": 2, "b": 1}),
            ("sum by (queue) (depth) / room", {"a": 5, "b": 3}),
            ("max by (queue) (depth / ignoring (worker) group_left room)", {"a": 3, "b": 3}),
            ("room > 2", {"b": 3}),
            ("2 < room", {"b": 3}),
            ("room > bool 2", {"a": 0, "b": 1}),
            ("room and on (queue) depth{worker='1'}", {"a": 2}),
            ("room unless on (queue) depth{worker='1'}", {"b": 3}),
            ("clamp_max(room, 2.5)", {"a": 2, "b": 2.5}),
            ("-room", {"a": -2, "b": -3}),
        ],
    )
    def test_by_queue(self, expression: str, expected: dict[str, float]) -> None:
        """Elements are grouped, matched and filtered by their labels."""
        values = values_of(expression, self.STORE, 2)

        assert {dict(labels)["queue"]: value for labels, value in values.items()} == expected

    @pytest.mark.parametrize(
        ("expression", "is_named"),
        [
            ("room", True),
            ("room > 1", True),
            ("room or depth", True),
            ("last_over_time(room[1m])", True),
            ("room > bool 1", False),
            ("room + 0", False),
            ("-room", False),
            ("abs(room)", False),
            ("sum_over_time(room[1m])", False),
            ("sum by (queue) (room)", False),
        ],
    )
    def test_the_name_goes_when_the_meaning_changes(self, expression: str, is_named: bool) -> None:
        """Only selections and filters keep the metric name."""
        assert {"__name__" in dict(labels) for labels in values_of(expression, self.STORE, 2)} == {is_named}

    @pytest.mark.parametrize(
        ("expression", "message"),
        [
            ("room * on (queue) depth", 'on the right side match {queue="a"}; aggregate that side'),
            ("depth * on (queue) room", 'on the left side match {queue="a"}; add group_left()'),
            ("depth * on (queue) group_right room", "on the left side match"),
            ('abs({__name__=~"room|depth", worker!="1"} * 0 + 1)', None),
            ('abs({__name__=~"rate|room", queue="a"} or depth{worker="1"})', None),
        ],
    )
    def test_ambiguous_pairs_are_refused(self, expression: str, message: str | None) -> None:
        """Two vectors pair up one to one unless the expression says otherwise; the error says how to mend it."""
        if message is None:
            assert values_of(expression, self.STORE, 2) != {}
        else:
            with pytest.raises(PromqlError) as caught:
                evaluate(expression, self.STORE, START_S + 2)
            assert message in str(caught.value)

    def test_two_series_must_not_become_one(self) -> None:
        """Dropping the name of two metrics with the same labels is an error, not a silent choice."""
        store = store_of(("a", {}, {1: 1}), ("b", {}, {1: 2}))

        with pytest.raises(PromqlError, match="several series with the same labels"):
            evaluate('abs({__name__=~"a|b"})', store, START_S + 2)


class TestNumbers:
    """Arithmetic of IEEE 754 where Python would raise."""

    @pytest.mark.parametrize(
        ("expression", "expected"),
        [
            ("1 / 0", math.inf),
            ("-1 / 0", -math.inf),
            ("0 / 0", math.nan),
            ("5 % 0", math.nan),
            ("Inf % 2", math.nan),
            ("-7 % 3", -1),
            ("2 ^ 3 ^ 2", 512),
            ("-2 ^ 2", -4),
            ("0 ^ -1", math.inf),
            ("(-8) ^ 0.5", math.nan),
            ("10 ^ 400", math.inf),
            ("(-10) ^ 401", -math.inf),
            ("1 < bool 2", 1),
            ("time() - 1.7e9", 5),
            ("scalar(vector(3)) * 2", 6),
            ("scalar(absent_series)", math.nan),
        ],
    )
    def test_scalars(self, expression: str, expected: float) -> None:
        """Numbers never raise."""
        assert evaluate(expression, Store(window_s=60), START_S + 5) == pytest.approx(expected, nan_ok=True)


def test_quantile_of_a_histogram() -> None:
    """Half of ten observations lie below the second bound: the quantile is interpolated in its bucket."""
    buckets = {"10": 2.0, "20": 8.0, "+Inf": 10.0}
    store = store_of(*[("h_bucket", {"le": bound, "role": "x"}, {1: count}) for bound, count in buckets.items()])

    assert values_of("histogram_quantile(0.5, h_bucket)", store, 2) == {(("role", "x"),): 15}
    assert values_of("histogram_quantile(0.9, h_bucket)", store, 2) == {(("role", "x"),): 20}


def test_history_needed_is_that_of_the_longest_look() -> None:
    """Ranges, offsets and the look-back of five minutes decide how much a store must keep."""
    needed = [
        history_needed_s(parse(text)) for text in ("1", "a", "a offset 1m", "rate(a[30s])", "rate(a[1h] offset 1m) + a")
    ]

    assert needed == [0, 300, 360, 30, 3660]


counters = st.lists(st.tuples(st.floats(0.001, 30), st.floats(0, 1e12)), min_size=2, max_size=60)


def stored(steps: list[tuple[float, float]]) -> tuple[Store, float]:
    """A store with one counter `c`, given gaps and values, and the time of its end."""
    store, now = Store(window_s=3600), START_S
    for gap, value in steps:
        now += gap
        store.append(Sample("c", (), now, value))
    return store, now


@settings(deadline=None)
@given(steps=counters, range_s=st.integers(1, 900), later=st.floats(0, 100))
def test_increase_is_never_negative(steps: list[tuple[float, float]], range_s: int, later: float) -> None:
    """However a counter jumps and resets, its increase is not negative, and rate is increase over the range."""
    store, now = stored(steps)
    increase = dict(evaluate(f"increase(c[{range_s}s])", store, now + later))
    rate = dict(evaluate(f"rate(c[{range_s}s])", store, now + later))

    assert all(value >= 0 for value in increase.values())
    assert rate == {labels: pytest.approx(value / range_s, rel=1e-15) for labels, value in increase.items()}


@settings(deadline=None)
@given(
    values=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.floats(-1e9, 1e9)), unique_by=lambda v: v[:2]
    )
)
def test_sums_of_groups_add_up(values: list[tuple[str, str, float]]) -> None:
    """The sum over groups is the sum over all, whichever way the groups are named."""
    store = store_of(*[("g", {"one": one, "two": two}, {1: value}) for one, two, value in values])
    total = values_of("sum(g)", store, 2)

    for grouped in (
        "sum(sum by (one) (g))",
        "sum(sum without (one) (g))",
        "sum(avg by (two) (g) * count by (two) (g))",
    ):
        assert values_of(grouped, store, 2) == {labels: pytest.approx(v, abs=1e-5) for labels, v in total.items()}


def test_fifty_thousand_series() -> None:
    """A set of 50,000 series is added up and ranked without a mistake."""
    store = Store(window_s=600)
    for second in range(3):
        for number in range(50_000):
            labels = (("group", str(number % 7)), ("number", str(number)))
            store.append(Sample("many_total", labels, START_S + 10 * second, float(number * second)))

    sums = values_of("sum by (group) (rate(many_total[20s]))", store, 20)
    largest = values_of("topk(2, many_total)", store, 20)

    assert sums == {
        (("group", str(group)),): pytest.approx(sum(range(group, 50_000, 7)) / 10, rel=1e-12) for group in range(7)
    }
    assert [dict(labels)["number"] for labels in largest] == ["49999", "49998"]
