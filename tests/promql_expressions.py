"""Random well-formed expressions over the series of `random_series`, for hypothesis to draw and to shrink."""

import math
import random
from collections.abc import Iterator

from hypothesis import strategies as st

from sidecar.samples import Sample, labels_of

START_S = 1_750_000_000
LENGTH_S = 300
ROLES, WORKERS, BOUNDS = ("target", "drafter"), ("0", "1", "2"), ("1.0", "4.0", "16.0", "+Inf")

STRANGE = (math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.0, -0.0, 1e16, -1.0, 1.0, 1 + 2**-52)


def random_series(rng: random.Random) -> Iterator[Sample]:
    """Integers at whole seconds, so that sums are exact, and a few odd numbers."""
    for role in ROLES:
        for worker in WORKERS:
            labels = labels_of(role=role, worker=worker)
            total = 0.0
            for second in range(rng.randrange(30), LENGTH_S - rng.randrange(100)):
                total = 0.0 if rng.random() < 0.01 else total + rng.randrange(20)
                yield Sample("work_total", labels, START_S + second, total)
                if rng.random() < 0.1:
                    yield Sample("strange", labels, START_S + second, rng.choice(STRANGE))
                if rng.random() < 0.6:
                    yield Sample("level", labels, START_S + second, float(rng.randint(-50, 50)))
        counts = dict.fromkeys(BOUNDS, 0.0)
        for second in range(0, LENGTH_S, 2):
            length = rng.lognormvariate(1, 1)
            for bound in BOUNDS:
                counts[bound] += length <= float(bound)
                yield Sample("size_bucket", labels_of(le=bound, role=role), START_S + second, counts[bound])
        yield Sample("limit", labels_of(role=role), START_S + 1, float(rng.randrange(1, 9)))
        yield Sample("limit", labels_of(role=role), START_S + 200, float(rng.randrange(1, 9)))


_NUMBERS = st.sampled_from(["0", "1", "-2", "3", "0.5", "10", "1e3", "NaN", "Inf", "-Inf"])
_MATCHERS = st.sampled_from(
    ["", '{role="target"}', '{role!="target"}', '{worker=~"0|1"}', '{worker!~"[12]", role=~".*er"}', '{none=""}']
)
_NAMES = st.sampled_from(["work_total", "level", "limit", "size_bucket", "strange", "nothing"])
_OFFSETS = st.sampled_from(["", "", "", " offset 20s", " offset -15s"])
_RANGES = st.sampled_from(["[1s]", "[10s]", "[45s]", "[2m]", "[90]"])
_LABELS = st.sampled_from(["", "role", "worker", "role, worker", "le", "none", "le, role"])

_SELECTORS = st.builds("{}{}{}".format, _NAMES, _MATCHERS, _OFFSETS)
_WINDOWS = st.builds("{}{}{}{}".format, _NAMES, _MATCHERS, _RANGES, _OFFSETS)
_OF_WINDOWS = st.sampled_from(
    ["rate", "increase", "delta", "irate", "idelta", "deriv", "changes", "resets"]
    + [f"{name}_over_time" for name in ("avg", "sum", "min", "max", "count", "last", "present", "stddev", "stdvar")]
)
_OF_VECTORS = st.sampled_from(
    [
        *("abs", "ceil", "floor", "round", "exp", "ln", "log2", "log10", "sqrt", "sgn", "deg", "rad", "sin", "atan"),
        *("timestamp", "sort", "hour", "day_of_week", "absent", "-", "+"),
    ]
)
_ARITHMETIC = st.sampled_from(["+", "-", "*", "/", "%", "^", "atan2"])
_COMPARISONS = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
_SIDES = st.sampled_from(["group_left", "group_right"])
_BOOL = st.sampled_from(["", "bool"])
_REDUCTIONS = st.sampled_from(["sum", "avg", "min", "max", "count", "group", "stddev", "stdvar"])
_GROUPINGS = st.one_of(st.just(""), st.builds("by ({})".format, _LABELS), st.builds("without ({})".format, _LABELS))
_MATCHINGS = st.one_of(
    st.just(""),
    st.builds("on ({})".format, _LABELS),
    st.builds("ignoring ({})".format, _LABELS),
    st.builds(
        "{} ({}) {}".format,
        st.sampled_from(["on", "ignoring"]),
        _LABELS,
        st.sampled_from(["group_left", "group_right"]),
    ),
    st.builds("on ({}) group_left ({})".format, _LABELS, _LABELS),
)

SIMPLE = st.one_of(
    _SELECTORS,
    st.builds("{}({})".format, _OF_WINDOWS, _WINDOWS),
    st.builds("quantile_over_time({}, {})".format, _NUMBERS, _WINDOWS),
    st.builds("predict_linear({}, {})".format, _WINDOWS, _NUMBERS),
    st.builds("absent_over_time({})".format, _WINDOWS),
    st.builds("vector({})".format, _NUMBERS),
)


def _extended(vectors: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    scalars = st.one_of(_NUMBERS, st.just("time()"), st.builds("scalar({})".format, vectors))
    return st.one_of(
        st.builds("{}({})".format, _OF_VECTORS, vectors),
        st.builds("round({}, {})".format, vectors, scalars),
        st.builds("clamp({}, {}, {})".format, vectors, scalars, scalars),
        st.builds("{}({}, {})".format, st.sampled_from(["clamp_min", "clamp_max"]), vectors, scalars),
        st.builds("histogram_quantile({}, {})".format, scalars, vectors),
        st.builds(
            'label_replace({}, "{}", "{}", "worker", "{}")'.format,
            vectors,
            st.sampled_from(["new", "role"]),
            st.sampled_from(["$1", "", "x-$1"]),
            st.sampled_from(["(.*)", "([01])", "", "2|1"]),
        ),
        st.builds('label_join({}, "{}", "-", "role", "worker")'.format, vectors, st.sampled_from(["new", "worker"])),
        st.builds("{} {} ({})".format, _REDUCTIONS, _GROUPINGS, vectors),
        st.builds("quantile {} ({}, {})".format, _GROUPINGS, scalars, vectors),
        st.builds('count_values {} ("new", {})'.format, _GROUPINGS, _SELECTORS),
        st.builds("({}) {} {} ({})".format, vectors, _ARITHMETIC, _MATCHINGS, vectors),
        st.builds("({}) {} {} {} ({})".format, vectors, _COMPARISONS, _BOOL, _MATCHINGS, vectors),
        st.builds(
            "({}) {} {} ({})".format,
            vectors,
            st.sampled_from(["and", "or", "unless"]),
            st.one_of(st.just(""), st.builds("on ({})".format, _LABELS)),
            vectors,
        ),
        st.builds("({}) {} {}".format, vectors, _ARITHMETIC, scalars),
        st.builds("{} {} ({})".format, scalars, _ARITHMETIC, vectors),
        st.builds("({}) {} {} {}".format, vectors, _COMPARISONS, _BOOL, scalars),
        st.builds("{} {} {} ({})".format, scalars, _COMPARISONS, _BOOL, vectors),
        st.builds("{} {} {}".format, scalars, _ARITHMETIC, scalars),
    )


EXPRESSIONS = st.recursive(SIMPLE, _extended, max_leaves=5)
"""Vectors and numbers; some are refused, for instance because two sides do not match one to one."""
