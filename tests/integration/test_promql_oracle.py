"""The engine against a real Prometheus over the same samples.

Every sample lies a quarter of a second off the query times, so that Prometheus 2 (windows closed on the left) and 3
(open) agree. Series that begin inside a window begin at zero, because the two limit the extrapolation to the zero
point in different order otherwise.
"""

import math
import random
import shutil
from collections.abc import Iterator

import pytest
from prometheus_server import PrometheusServer, prometheus_with

from sidecar.promql.engine import evaluate
from sidecar.promql.values import PromqlError, Vector
from sidecar.samples import Sample, labels_of
from sidecar.store import Store

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed",
)

START_S = 1_750_000_000
TIMES_S = (START_S + 7, START_S + 61, START_S + 180, START_S + 299, START_S + 420, START_S + 700)
TOLERANCE = 1e-9

SELECTIONS = [
    "jobs_total",
    'jobs_total{role="target"}',
    'jobs_total{role!="target"}',
    'jobs_total{role=~"tar.*|x"}',
    'jobs_total{role!~"tar.*", worker=~"[01]"}',
    'jobs_total{role=~"tar"}',
    'jobs_total{missing=""}',
    'jobs_total{missing!=""}',
    '{__name__=~"jobs_total|depth", worker="0"}',
    '{role="target", worker=~".+"}',
    "depth offset 30s",
    "depth offset -30s",
    "absent_series",
]
RANGES = [
    f"{function}({series}[{range_}])"
    for function in ("rate", "irate", "increase", "delta")
    for series in ("jobs_total", "patchy_total", "late_total", "depth")
    for range_ in ("30s", "2m")
] + [
    f"{function}_over_time({series}[{range_}])"
    for function in ("avg", "sum", "min", "max", "count", "last")
    for series in ("depth", "odd", "patchy_total")
    for range_ in ("1500ms", "45s")
]
OPERATIONS = [
    "-depth",
    "-(2 ^ 3 ^ 0) * -depth",
    "depth % 3",
    "depth % 0",
    "-7 % depth",
    "(depth - 4) ^ 0.5",
    "2 ^ depth",
    "depth / 0",
    "1 / (depth - depth)",
    "depth > 4",
    "4 >= depth",
    "depth == bool 4",
    "1 < bool 2",
    "abs(depth) atan2 3",
    "odd + 1",
    "odd < 3",
    "odd != odd",
    "depth / capacity",
    "depth / on (queue) capacity",
    "depth / ignoring (worker) capacity",
    "depth / ignoring (worker, role) group_left capacity",
    "depth / on (queue) group_left (flavour) capacity",
    "capacity * on (queue) group_right (flavour) depth",
    "depth > on (queue) group_left capacity",
    "depth <= bool on (queue) group_left capacity",
    "capacity < on (queue) group_right depth",
    "depth > on (queue, worker, role) depth",
    "depth > ignoring (queue) depth",
    "jobs_total + depth",
    "sum by (worker) (depth) + on (worker) sum by (worker) (capacity)",
    "depth and on (queue) capacity",
    "depth and jobs_total",
    "depth unless on (queue) capacity{queue='a'}",
    "capacity or depth",
    "capacity or on (queue) depth",
    "scalar(sum(depth)) * 2",
    "scalar(depth)",
    "vector(3) + 1",
    "time() - 1",
    "vector(time())",
    "abs(depth - 5)",
    "clamp_min(odd, 2)",
    "clamp_max(odd, 2)",
    'abs({__name__=~"depth|capacity", queue="a"})',
    'rate({__name__=~"jobs_total|late_total"}[1m])',
    "0x10 + 1e1 + NaN",
    "Inf - Inf",
]
AGGREGATIONS = [
    f"{function} {grouping} ({series})"
    for function in ("sum", "avg", "min", "max", "count")
    for grouping in ("", "by (role)", "by (role, nothing)", "without (worker)", "by (__name__, worker)", "without ()")
    for series in ("jobs_total", "odd", "rate(jobs_total[1m])")
]
HISTOGRAMS = [
    f"histogram_quantile({quantile}, {buckets})"
    for quantile in ("0", "0.25", "0.5", "0.99", "1", "-1", "2", "NaN")
    for buckets in (
        "length_bucket",
        "rate(length_bucket[1m])",
        "sum by (le) (rate(length_bucket[1m]))",
        'length_bucket{le!="+Inf"}',
        'length_bucket{le="+Inf"}',
        "depth",
    )
]


def counters(rng: random.Random) -> Iterator[Sample]:
    """Counters: with resets, with gaps and jitter, born late at zero, and a histogram."""
    for role, worker in [("target", "0"), ("target", "1"), ("drafter", "0"), ("drafter", "2")]:
        value = rng.uniform(0, 1e6)
        for second in range(420):
            value = 0.0 if rng.random() < 0.02 else value + rng.expovariate(0.1)
            yield Sample("jobs_total", labels_of(role=role, worker=worker), START_S + second + 0.25, value)
    value = 1e9
    for second in range(420):
        value += rng.uniform(0, 3)
        if rng.random() < 0.3 and not 100 < second < 160:
            yield Sample("patchy_total", (), START_S + second + rng.choice((0.2, 0.456, 0.75)), value)
    for second in range(50, 420):
        yield Sample("late_total", labels_of(role="target", worker="0"), START_S + second + 0.25, (second - 50) * 0.1)
    counts = dict.fromkeys(("1.0", "2.5", "10.0", "+Inf"), 0.0)
    for second in range(420):
        length = rng.lognormvariate(1, 1)
        for bound in counts:
            counts[bound] += second > 0 and length <= float(bound)
            yield Sample("length_bucket", labels_of(le=bound, role="drafter"), START_S + second + 0.25, counts[bound])


def gauges(rng: random.Random) -> Iterator[Sample]:
    """Gauges: queue depths that share labels with capacities, and values no gauge should have."""
    for queue, worker in [("a", "0"), ("a", "1"), ("b", "0"), ("c", "0")]:
        for second in range(420):
            labels = labels_of(queue=queue, worker=worker, role="target")
            yield Sample("depth", labels, START_S + second + 0.75, float(rng.randint(0, 9) if second else 0))
    for queue, flavour, capacity in [("a", "sweet", 8.0), ("b", "sour", 4.0), ("d", "dry", 1.0)]:
        for second in range(0, 420, 15):
            yield Sample("capacity", labels_of(queue=queue, flavour=flavour), START_S + second + 0.75, capacity)
    for worker in ("0", "1", "2"):
        for second in range(420):
            value = rng.choice((math.nan, math.inf, -math.inf, 1.0, 2.5, -3.0, 4e300))
            yield Sample("odd", labels_of(role="target", worker=worker), START_S + second + 0.75, value)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """The same samples for both sides."""
    rng = random.Random(20)
    return [*counters(rng), *gauges(rng)]


@pytest.fixture(scope="module")
def store(samples: list[Sample]) -> Store:
    """Our side."""
    store = Store(window_s=3600)
    store.append_many(samples)
    return store


@pytest.fixture(scope="module")
def prometheus(samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """The other side."""
    with prometheus_with(samples, tmp_path_factory.mktemp("prometheus")) as server:
        yield server


def ours(expression: str, store: Store, time_s: float) -> float | Vector | None:
    """Evaluate with the engine; None when it refuses."""
    try:
        return evaluate(expression, store, time_s)
    except PromqlError:
        return None


def agrees(actual: float, expected: float) -> bool:
    """Tell whether two values agree, NaN with NaN."""
    return (math.isnan(actual) and math.isnan(expected)) or actual == pytest.approx(expected, rel=TOLERANCE, abs=0)


@pytest.mark.parametrize("expression", SELECTIONS + RANGES + OPERATIONS + AGGREGATIONS + HISTOGRAMS)
def test_engine_agrees_with_prometheus(expression: str, store: Store, prometheus: PrometheusServer) -> None:
    """An expression gives the same labels and the same values as in Prometheus, or is refused by both."""
    for time_s in TIMES_S:
        actual, expected = ours(expression, store, time_s), prometheus.query(expression, time_s)
        if isinstance(actual, list) and isinstance(expected, list):
            values = dict(expected)
            assert sorted(labels for labels, _ in actual) == sorted(values)
            differing = [(labels, value) for labels, value in actual if not agrees(value, values[labels])]
            assert differing == []
        elif isinstance(actual, float) and isinstance(expected, float):
            assert agrees(actual, expected)
        else:
            assert actual == expected


def test_samples_are_seen(store: Store, prometheus: PrometheusServer) -> None:
    """The comparison is not one of nothing with nothing: both sides see every series in the middle of its life."""
    for name, num_series in [("jobs_total", 4), ("depth", 4), ("odd", 3), ("length_bucket", 4), ("late_total", 1)]:
        expected = prometheus.query(name, TIMES_S[2])
        assert isinstance(expected, list)
        assert len(store.select(())) >= 16
        assert len(expected) == num_series
