"""Functions and aggregations by hand, so that a machine without Prometheus tests them too."""

import datetime as dt
import math
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.promql import statistics
from sidecar.promql.aggregations import Grouping, aggregate
from sidecar.promql.dates import PARTS
from sidecar.promql.engine import evaluate
from sidecar.promql.values import PromqlError, without_name
from sidecar.samples import Labels, Sample, labels_of
from sidecar.store import Store

START_S = 1_700_000_000.0


@pytest.fixture(scope="module")
def store() -> Store:
    """A counter that reset once, two gauges and a histogram, the newest sample at ten seconds."""
    store = Store(window_s=3600)
    for second, value in enumerate((0.0, 2.0, 4.0, 1.0, 1.0, 5.0)):
        store.append(Sample("work_total", labels_of(worker="0"), START_S + 2 * second, value))
    for worker, value in (("0", 3.0), ("1", -1.5), ("2", math.nan)):
        store.append(Sample("level", labels_of(worker=worker, role="target"), START_S + 9, value))
    for le, value in (("1", 2.0), ("2", 6.0), ("+Inf", 8.0)):
        store.append(Sample("size_bucket", labels_of(le=le), START_S + 9, value))
    return store


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("changes(work_total[20s])", [4]),
        ("resets(work_total[20s])", [1]),
        ("idelta(work_total[20s])", [4]),
        ("deriv(work_total[5s])", [1]),
        ("predict_linear(work_total[5s], 4)", [25 / 3]),
        ("quantile_over_time(0.5, work_total[20s])", [1.5]),
        ("stdvar_over_time(work_total[5s])", [32 / 9]),
        ("stddev_over_time(work_total[5s])", [math.sqrt(32 / 9)]),
        ("present_over_time(work_total[20s])", [1]),
        ("absent_over_time(work_total[20s])", []),
        ('absent(level{worker="7", role!="x"})', [1]),
        ("timestamp(level)", [START_S + 9] * 3),
        ("timestamp(level * 1)", [START_S + 10] * 3),
        ("round(level, 2)", [4, -2, math.nan]),
        ("clamp(level, 0, 2)", [2, 0, math.nan]),
        ("clamp(level, 2, 0)", []),
        ("sgn(level)", [1, -1, math.nan]),
        ("sort(level)", [-1.5, 3, math.nan]),
        ("sort_desc(level)", [3, -1.5, math.nan]),
        ("topk(2, level)", [3, -1.5]),
        ("bottomk(1, level)", [-1.5]),
        ("quantile(1, level)", [3]),
        ("group(level)", [1]),
        ("stdvar(level > -9)", [5.0625]),
        ("count by (role) (level)", [3]),
        ("histogram_quantile(0.5, size_bucket)", [1.5]),
        ("histogram_fraction(1, 1.5, size_bucket)", [0.25]),
        ("minute()", [13]),
        ("days_in_month(vector(951782400))", [29]),
    ],
)
def test_values(expression: str, expected: list[float], store: Store) -> None:
    """Each expression gives these values at ten seconds, in this order."""
    vector = evaluate(expression, store, START_S + 10)

    assert isinstance(vector, list)
    assert [value for _, value in vector] == [pytest.approx(value, rel=1e-12, nan_ok=True) for value in expected]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('label_replace(work_total, "who", "w-$1", "worker", "(.*)")', {"worker": "0", "who": "w-0"}),
        ('label_replace(work_total, "who", "${name}$$", "worker", "(?P<name>.)")', {"worker": "0", "who": "0$"}),
        ('label_replace(work_total, "who", "x", "worker", "1")', {"worker": "0"}),
        ('label_replace(work_total, "worker", "", "", "")', {}),
        ('label_join(work_total, "who", "/", "worker", "none", "worker")', {"worker": "0", "who": "0//0"}),
        ('absent(none{a="b", c=~"d", e=""})', {"a": "b"}),
        ('count_values("seen", work_total)', {"seen": "5"}),
    ],
)
def test_labels(expression: str, expected: dict[str, str], store: Store) -> None:
    """Each expression gives one element with these labels, apart from the name."""
    vector = evaluate(expression, store, START_S + 10)

    assert isinstance(vector, list)
    assert [dict(without_name(labels)) for labels, _ in vector] == [expected]


@pytest.mark.parametrize(
    "expression",
    [
        "topk(NaN, level)",
        "bottomk(1e300, level)",
        'label_replace(level, "worker", "same", "", "")',
        'label_join(level, "worker", "")',
    ],
)
def test_refusals_while_evaluating(expression: str, store: Store) -> None:
    """What cannot be answered is an error, not a guess."""
    with pytest.raises(PromqlError):
        evaluate(expression, store, START_S + 10)


@given(st.datetimes(timezones=st.just(dt.UTC)))
@example(dt.datetime(1900, 2, 28, 23, 59, 59, tzinfo=dt.UTC))
@example(dt.datetime(2000, 2, 29, tzinfo=dt.UTC))
def test_dates_agree_with_datetime(time: dt.datetime) -> None:
    """The parts of a date are those of Python's calendar, wherever that reaches."""
    time = time.replace(microsecond=0)
    parts = {
        "minute": time.minute,
        "hour": time.hour,
        "day_of_week": time.isoweekday() % 7,
        "day_of_month": time.day,
        "day_of_year": time.timetuple().tm_yday,
        "days_in_month": ((time.replace(day=28) + dt.timedelta(days=4)).replace(day=1) - dt.timedelta(days=1)).day
        if time.year < dt.MAXYEAR
        else None,
        "month": time.month,
        "year": time.year,
    }

    assert {name: PARTS[name](time.timestamp()) for name in parts if parts[name]} == {
        name: part for name, part in parts.items() if part
    }


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_sums_are_exact(values: list[float]) -> None:
    """Sums and means are those of exact arithmetic, to the last bits."""
    exact = sum(map(Decimal, values))
    scale = max(map(abs, values))

    assert statistics.total(values) == pytest.approx(float(exact), rel=1e-15, abs=scale * 1e-25)
    assert statistics.mean(values) == pytest.approx(float(exact / len(values)), rel=1e-15, abs=scale * 1e-25)


@given(
    values=st.lists(st.tuples(st.sampled_from("ab"), st.integers(-5, 5)), max_size=12),
    count=st.integers(0, 14),
)
def test_extremes_are_the_ends_of_the_order(values: list[tuple[str, int]], count: int) -> None:
    """`topk` of every group are its largest values, `bottomk` its smallest."""
    vector: list[tuple[Labels, float]] = [
        ((("group", group), ("number", str(number))), float(value)) for number, (group, value) in enumerate(values)
    ]
    for operator, descending in (("topk", True), ("bottomk", False)):
        picked = aggregate(operator, vector, Grouping(frozenset({"group"}), without=False), float(count))
        for group in "ab":
            ordered = sorted((float(v) for g, v in values if g == group), reverse=descending)
            assert [value for labels, value in picked if labels[0][1] == group] == ordered[:count]
