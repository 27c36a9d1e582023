"""The benchmark of definitions measures what it says."""

from bench.engine import EXPRESSIONS, RANGES, START_S, definition_nodes, filled, series_of
from sidecar.promql.engine import evaluate


def test_two_hundred_definitions_over_five_hundred_series() -> None:
    """There are 200 different definitions and 500 series, and nearly every definition finds some of them."""
    series, nodes = list(series_of(1)), definition_nodes()
    store = filled(series, num_seconds=40)
    empty = [node for node in nodes if evaluate(node, store, START_S + 39) == []]

    assert (len(set(series)), len(set(nodes))) == (500, len(EXPRESSIONS) * len(RANGES))
    assert len(nodes) == 200
    assert empty == []
