"""The variable that chooses a run, over the labels that a sidecar gives to several runs and ranks."""

from pathlib import Path

import pytest
from prometheus_server import binary, prometheus_with

from monitoring.dashboards.panels import in_full
from sidecar.samples import Sample, labels_of

TIME_S = 1_750_000_000.0
TRAINERS = (
    # Alone on its node, so without labels of its own; the info names its run, and always a rank.
    ("one", {}, {"run_id": "main", "rank": "0"}, 1.0),
    # A second run on the same node, and two ranks of one run on another node.
    ("one", {"run": "side"}, {"run_id": "side", "rank": "0"}, 2.0),
    ("two", {"rank": "0"}, {"run_id": "wide", "rank": "0"}, 3.0),
    ("two", {"rank": "1"}, {"run_id": "wide", "rank": "1"}, 4.0),
)
"""Node, the labels of its series, those of its info, and its loss."""


@pytest.mark.skipif(binary("prometheus") is None, reason="prometheus is not installed")
def test_panels_show_the_chosen_runs_and_no_others(tmp_path: Path) -> None:
    """A panel shows the trainers of the chosen runs on the chosen nodes, whatever labels their series have."""
    samples = []
    for node, labels, info, loss in TRAINERS:
        samples.append(Sample("dflash_loss", labels_of(instance=node, **labels), TIME_S, loss))
        samples.append(Sample("dflash_run_info", labels_of(instance=node, **{**labels, **info}), TIME_S, 1.0))
    losses = {}
    with prometheus_with(samples, tmp_path) as prometheus:
        for run, node in ((".*", ".*"), ("main", ".*"), ("side", ".*"), ("wide", ".*"), ("(main|wide)", "two")):
            expression = in_full("dflash_loss{NODE} OF_RUN").replace("$run", run).replace("$node", node)
            found = prometheus.query(expression, TIME_S)
            assert isinstance(found, list)
            losses[run, node] = sorted(value for _, value in found)

    assert losses == {
        (".*", ".*"): [1.0, 2.0, 3.0, 4.0],
        ("main", ".*"): [1.0],
        ("side", ".*"): [2.0],
        ("wide", ".*"): [3.0, 4.0],
        ("(main|wide)", "two"): [3.0, 4.0],
    }
