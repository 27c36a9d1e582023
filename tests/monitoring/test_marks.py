"""Marks of changed definitions, which have no time stamp of their own."""

from pathlib import Path

import pytest
from prometheus_server import binary, prometheus_with

from monitoring.dashboards.builder import DEFINITION_CHANGES
from monitoring.dashboards.panels import in_full
from sidecar.samples import Sample, labels_of

START_S = 1_750_000_000
CHANGED_S = START_S + 600
SCRAPE_S = 15
AWAY_S = range(START_S + 200, START_S + 400)
"""While the sidecar is away; it comes back with the definitions that it had."""


@pytest.mark.skipif(binary("prometheus") is None, reason="prometheus is not installed")
def test_a_change_is_marked_where_it_happened_and_nowhere_else(tmp_path: Path) -> None:
    """The new digest is marked for a minute; an absence of the sidecar is no change."""
    samples = []
    for time_s in range(START_S, START_S + 1200, SCRAPE_S):
        if time_s not in AWAY_S:
            digest = "old" if time_s < CHANGED_S else "new"
            labels = labels_of(instance="a", digest=digest)
            samples.append(Sample("dflash_definitions_info", labels, float(time_s), 1.0))
    expression = in_full(DEFINITION_CHANGES).replace("$node", ".*")
    marks = set()
    with prometheus_with(samples, tmp_path) as prometheus:
        for time_s in range(START_S + 90, START_S + 1200, SCRAPE_S):
            found = prometheus.query(expression, float(time_s))
            assert isinstance(found, list)
            marks |= {(dict(labels)["digest"], time_s) for labels, _ in found}

    assert {digest for digest, _ in marks} == {"new"}
    times_s = [time_s for _, time_s in marks]
    assert CHANGED_S <= min(times_s) < CHANGED_S + SCRAPE_S
    assert max(times_s) < CHANGED_S + 60 + SCRAPE_S
