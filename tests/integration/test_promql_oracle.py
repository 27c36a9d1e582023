"""The engine against a real Prometheus over the same samples: each function, aggregation and operator at many times."""

import re
from collections.abc import Iterator

import pytest
from prometheus_server import PrometheusServer, major_version, prometheus_with
from promql_comparison import assert_same, ours
from promql_series import TIMES_S, hand_made

from sidecar.promql.aggregations import AGGREGATIONS
from sidecar.promql.dates import PARTS
from sidecar.promql.functions import FUNCTIONS
from sidecar.promql.operators import OPERATORS
from sidecar.store import Store

pytestmark = pytest.mark.skipif(not major_version(), reason="prometheus and promtool are not installed")
only_3 = pytest.mark.skipif(major_version() < 3, reason="Prometheus 2 means something else by this")

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
    'quoted{text="a \\"b\\" \\\\ c\\nd"}',
    "depth offset 30s",
    "depth offset -30s",
    "gone_total",
    "absent_series",
]
RANGES = [
    f"{function}({series}[{range_}])"
    for function in ("rate", "irate", "increase", "delta", "idelta", "deriv", "changes", "resets")
    for series in ("jobs_total", "patchy_total", "late_total", "gone_total", "depth", "odd", "noise")
    for range_ in ("30s", "2m", "4m offset 1m")
]
OVER_TIME = [
    f"{function}_over_time({series}[{range_}])"
    for function in ("avg", "sum", "min", "max", "count", "last", "present", "absent", "stddev", "stdvar")
    for series in ("depth", "patchy_total", "noise", "constant", "missing")
    for range_ in ("1600ms", "45s", "5m")
]
OF_PARAMETERS = [
    call.format(series)
    for call in (
        "quantile_over_time(0.3, {}[45s])",
        "quantile_over_time(NaN, {}[45s])",
        "quantile_over_time(-1, {}[45s])",
        "quantile_over_time(2, {}[5m])",
        "quantile_over_time(scalar(capacity{{queue='d'}}) / 3, {}[5m])",
        "predict_linear({}[45s], 60)",
        "predict_linear({}[5m] offset 10s, -3600)",
    )
    for series in ("depth", "odd", "patchy_total", "noise", "large", "constant", "missing")
]
OF_NUMBERS = [
    f"{function}(angle)"
    for function in (
        *("abs", "ceil", "floor", "round", "exp", "ln", "log2", "log10", "sqrt", "sgn", "deg", "rad"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    )
] + [
    *("round(angle, 0.1)", "round(angle, 0)", "round(angle, NaN)", "round(angle, -7)", "round(noise, 1e-3)"),
    *("clamp(angle, -1, 1)", "clamp(angle, 1, -1)", "clamp(angle, NaN, 1)", "clamp(angle, 1, NaN)"),
    *("clamp_min(angle, 0.7)", "clamp_min(angle, NaN)", "clamp_max(angle, 0.7)", "clamp_max(angle, NaN)"),
    *("clamp_max(angle, -Inf)", "clamp_min(angle, Inf)", "pi()", "time()", "vector(pi())", "1 / ceil(-angle / 2)"),
]
DATES = [f"{part}({argument})" for part in PARTS for argument in ("", "day", "vector(time())")]
LABELS = [
    'label_replace(jobs_total, "who", "$1-${worker}-$2$$", "worker", "(.*)")',
    'label_replace(jobs_total, "who", "x${name}y$name", "role", "(?P<name>.).*")',
    'label_replace(jobs_total, "role", "", "role", "target")',
    'label_replace(jobs_total, "__name__", "other", "worker", "0")',
    'label_replace(jobs_total, "who", "$", "missing", "")',
    'label_replace(jobs_total, "who", "$1", "worker", "[1-9]")',
    'label_replace(jobs_total, "worker", "same", "role", "target")',
    'label_join(jobs_total, "who", "/", "worker", "missing", "role")',
    'label_join(jobs_total, "role", "")',
    'label_join(jobs_total, "worker", ",", "role")',
    *("absent(jobs_total)", 'absent(missing{a="b", c=~"d", e="f", e="g", h=""})', "absent(sum(missing))"),
    *('absent_over_time(missing{a="b"}[1m])', "absent_over_time(gone_total[1m])", 'absent({a="b"})'),
    *("timestamp(patchy_total)", "timestamp(depth offset 30s)", "timestamp((depth))", "timestamp(depth + 1)"),
    *("sort(jobs_total)", "sort_desc(odd)", "scalar(sum(depth))", "scalar(depth)", "scalar(missing)"),
    *("vector(3) + 1", "time() - 1", "vector(time())", '"text"', "depth[1m]"),
]
OPERATIONS = [
    *("-depth", "+depth", "-(2 ^ 3 ^ 0) * -depth", "depth % 3", "depth % 0", "-7 % depth", "(depth - 4) ^ 0.5"),
    *("2 ^ depth", "depth / 0", "1 / (depth - depth)", "depth > 4", "4 >= depth", "depth == bool 4", "1 < bool 2"),
    *("abs(depth) atan2 3", "depth atan2 odd", "odd + 1", "odd < 3", "odd != odd", "odd == bool NaN", "angle ^ angle"),
    *("angle % angle", "angle ^ 3", "-2 ^ 2", "2 ^ -1", "0x10 + 1e1 + NaN", "Inf - Inf", "-1 ^ 0.5"),
    "depth / capacity",
    "depth / on (queue) capacity",
    "depth / ignoring (worker) capacity",
    "depth / ignoring (worker, role) group_left capacity",
    "depth / on (queue) group_left (flavour) capacity",
    "depth / on (queue) group_left (flavour, missing, worker) capacity",
    "capacity * on (queue) group_right (flavour) depth",
    "depth > on (queue) group_left capacity",
    "depth > on (queue) group_left (__name__) capacity",
    "depth + on (queue) group_left (__name__) capacity",
    "depth > bool on (queue) group_left (__name__) capacity",
    "depth <= bool on (queue) group_left capacity",
    "capacity < on (queue) group_right depth",
    "depth > on (queue, worker, role) depth",
    "depth == on (queue, worker, __name__) depth",
    "depth > ignoring (queue) depth",
    "missing / on (queue) depth",
    "jobs_total + depth",
    "sum by (worker) (depth) + on (worker) sum by (worker) (capacity)",
    "depth and on (queue) capacity",
    "depth and jobs_total",
    "depth and on () missing",
    "depth unless on (queue) capacity{queue='a'}",
    "capacity or depth",
    "capacity or on (queue) depth",
    "depth or ignoring (worker) jobs_total",
    "scalar(sum(depth)) * 2",
    'abs({__name__=~"depth|capacity", queue="a"})',
    '-{__name__=~"jobs_total|late_total"}',
    'rate({__name__=~"jobs_total|late_total"}[1m])',
    'last_over_time({__name__=~"jobs_total|late_total"}[1m])',
]
GROUPINGS = ("", "by (role)", "by (role, nothing)", "without (worker)", "by (__name__, worker)", "without ()")
AGGREGATED = [
    f"{function} {grouping} ({series})"
    for function in ("sum", "avg", "min", "max", "count", "group", "stddev", "stdvar")
    for grouping in GROUPINGS
    for series in ("jobs_total", "rate(jobs_total[1m])")
] + [
    f"{function} {grouping} ({parameter}, {series})"
    for function, parameters in (
        ("quantile", ("0", "0.3", "1", "-1", "2", "NaN")),
        ("topk", ("1", "2", "2.9", "0", "-3", "100")),
        ("bottomk", ("1", "2", "1e3")),
        ("count_values", ('"value"', '"role"', '"__name__"')),
    )
    for parameter in parameters
    for grouping in GROUPINGS
    for series in ("jobs_total", "rate(jobs_total[1m])", "missing")
]
AGGREGATED += [
    *('count_values("value", angle)', 'count_values without (index) ("value", -angle)', "quantile(0.4, angle)"),
    *("sum(noise)", "avg by (label_3) (noise)", "stddev(overflowing)", "topk(5, noise)", "bottomk(5, noise)"),
    *("sum(overflowing)", "avg(overflowing)", "sum(abs(overflowing))", "avg(abs(overflowing))"),
]
HISTOGRAMS = [
    f"histogram_quantile({quantile}, {buckets})"
    for quantile in ("0", "0.25", "0.5", "0.99", "1", "-1", "2", "NaN")
    for buckets in (
        *("length_bucket", "rate(length_bucket[1m])", "sum by (le) (rate(length_bucket[1m]))", "depth"),
        *('length_bucket{le!="+Inf"}', 'length_bucket{le="+Inf"}', '{__name__=~"(torn|split)_bucket", case="twice"}'),
    )
]
ONLY_3 = (
    [f"histogram_quantile({quantile}, torn_bucket)" for quantile in ("0", "0.2", "0.5", "0.8", "1")]
    + [
        f"histogram_fraction({bounds}, {buckets})"
        for bounds in ("0, 1", "-Inf, 2", "1.5, Inf", "-5, 5", "3, 2", "NaN, 1")
        for buckets in ("length_bucket", "torn_bucket", "rate(length_bucket[1m])", "split_bucket")
    ]
    + [
        f"{function}(exact_total[{range_}])"
        for function in ("rate", "increase", "sum_over_time")
        for range_ in (10, 60)
    ]
    + [
        "depth[30]",
        "sum_over_time(depth[30])",
        "sum_over_time(depth[1.5])",
        "depth offset 30",
        "exact_total",
        "1h + 30",
    ]
    + ['label_replace(quoted, "who", "$1", "text", "a (.*)")', *(f"{part}(angle)" for part in PARTS)]
)

REFUSED = [
    *("1 > 2", "rate(depth)", "abs(depth[5m])", "depth[5m] + 1", "topk(depth)", "sum(1, depth)", '"a" + 1', "{}"),
    *('{a=""}', 'depth{a=~"("}', "depth bool 1", "1 and depth", "depth + on (a) group_left (a) depth", "nothing()"),
    *(
        'count_values("", depth)',
        'label_replace(depth, "", "", "", "")',
        'label_join(depth, "", ",")',
        "topk('1', depth)",
    ),
    *('label_join(depth, "a", ",", "")', 'label_replace(depth, "a", "", "", "(")', 'label_replace(depth, "a", "b")'),
    *("depth * on (queue) depth", "depth * on (queue) group_left depth", "sum(depth) by", "depth offset", "-'a'"),
    *(
        'label_replace(depth, "worker", "", "", "")',
        '-{__name__=~"depth|noise|level"} and',
        "absent(1)",
        "histogram_quantile(1)",
    ),
]
"""Wrong in form, in type or with these samples."""


@pytest.fixture(scope="module")
def store() -> Store:
    """Our side."""
    store = Store(window_s=3600)
    store.append_many(hand_made())
    return store


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """The other side, with the same samples."""
    with prometheus_with(hand_made(), tmp_path_factory.mktemp("prometheus")) as server:
        yield server


EVERYWHERE = [
    *(*SELECTIONS, *RANGES, *OVER_TIME, *OF_PARAMETERS, *OF_NUMBERS, *DATES),
    *(*LABELS, *OPERATIONS, *AGGREGATED, *HISTOGRAMS),
]


@pytest.mark.parametrize(
    "expression", [*EVERYWHERE, *(pytest.param(expression, marks=only_3) for expression in ONLY_3)]
)
def test_engine_agrees_with_prometheus(expression: str, store: Store, prometheus: PrometheusServer) -> None:
    """An expression gives the same labels and the same values as in Prometheus, or is refused by both."""
    for time_s in TIMES_S:
        assert_same(ours(expression, store, time_s), prometheus.query(expression, time_s))


@pytest.mark.parametrize("expression", REFUSED)
def test_refusals(expression: str, store: Store, prometheus: PrometheusServer) -> None:
    """What Prometheus refuses is refused."""
    assert prometheus.query(expression, TIMES_S[2]) is None
    assert ours(expression, store, TIMES_S[2]) is None


def test_every_construct_is_compared() -> None:
    """No function, aggregation or operator that the engine knows is missing from the comparison."""
    text = "\n".join(EVERYWHERE + ONLY_3)
    words = {*FUNCTIONS, *AGGREGATIONS, *(operator for operator in OPERATORS if operator.isalnum())}

    assert {word for word in words if not re.search(rf"\b{word}\b", text)} == set()
    assert {operator for operator in OPERATORS if f" {operator} " not in text} == set()


def test_samples_are_seen(prometheus: PrometheusServer) -> None:
    """The comparison is not one of nothing with nothing: most expressions give values, and a few are refused."""
    answers = [prometheus.query(expression, TIMES_S[2]) for expression in EVERYWHERE]

    assert sum(answer is None for answer in answers) > 10
    assert sum(answer not in (None, []) for answer in answers) > 0.7 * len(answers)
