"""The engine against Prometheus 3 on expressions that hypothesis makes up."""

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_server import PrometheusServer, major_version, prometheus_with
from promql_comparison import assert_same, ours
from promql_expressions import EXPRESSIONS, LENGTH_S, START_S, random_series

from sidecar.store import Store

pytestmark = pytest.mark.skipif(major_version() < 3, reason="Prometheus 3 is not installed")

SEED = int(os.environ.get("PROMQL_SEED", "1"))
"""For other series and other expressions than those of every day."""

SECONDS = st.integers(0, LENGTH_S + 310) | st.floats(0, LENGTH_S).map(lambda second: round(second, 3))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, PrometheusServer]]:
    """Both sides with the same samples."""
    samples = list(random_series(random.Random(SEED)))
    store = Store(window_s=3600)
    store.append_many(samples)
    with prometheus_with(samples, tmp_path_factory.mktemp("prometheus")) as server:
        yield store, server


@settings(
    max_examples=int(os.environ.get("PROMQL_EXAMPLES", "800")),
    deadline=None,
    derandomize="PROMQL_SEED" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(
    expression=EXPRESSIONS, second=st.integers(0, LENGTH_S + 310) | st.floats(0, LENGTH_S).map(lambda s: round(s, 3))
)
def test_any_expression(expression: str, second: float, both: tuple[Store, PrometheusServer]) -> None:
    """Whatever the expression and the time, both give the same labels and values, or both refuse."""
    store, server = both
    time_s = START_S + second
    assert_same(ours(expression, store, time_s), server.query(expression, time_s))
