"""Every query of the dashboards, answered by a real Prometheus that scrapes a sidecar beside a real training run."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from monitoring_queries import MONITORING, committed_queries, queries_of
from nvml_machine import machine_of
from prometheus_server import PrometheusServer, prometheus_configured
from sidecar_process import Place, wait_for
from training_run import trainer_arguments

from sidecar.catalogue import CATALOGUE
from sidecar.definitions import SHIPPED_FILE, load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

MAY_BE_EMPTY = {
    "Evaluated acceptance length": "there is an evaluation only at the end of a run",
    "Acceptance length: evaluated": "there is an evaluation only at the end of a run",
    "annotation: Evaluations": "there is an evaluation only at the end of a run",
    "annotation: Errors": "nothing goes wrong",
    "annotation: Definitions": "the definitions do not change",
    "Samples skipped": "no sample is unfit",
    "rejected": "no frame is malformed",
    "Allocator": "training on CPUs has no CUDA allocator",
    "Fragmentation": "training on CPUs has no CUDA allocator",
    "Allocation trouble": "training on CPUs has no CUDA allocator",
    "Pressure": "a kernel may count no pressure",
    "Pressure in the group": "a kernel may count no pressure",
    "CPU quota": "the tests may run without a quota",
    "Quota in CPUs": "the tests may run without a quota",
    "Memory under the limit": "the tests may run without a limit",
    "Memory of its control group": "the tests may run without a limit",
    "Killed for want of memory": "the tests may run in no control group of their own",
    "Memory of the trainer: unique": "it is read seldom",
    "Network": "the tests may run on a host with loopback alone",
}
"""Parts of the names of queries that may find nothing here, and why."""


@pytest.fixture(scope="module")
def prometheus(small_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """A server that has scraped for a while: training beside two GPUs, both throttled, one with an XID error."""
    path = tmp_path_factory.mktemp("live")
    place = Place(path)
    machine = machine_of(place.environ, path, 2)
    for gpu in range(2):
        machine.set_power(gpu, 500_000)
    place.popen(*trainer_arguments(small_target, path / "run", checkpoint__every_steps=20))
    sidecar = place.sidecar("--set=collectors.interval_s=0.5", "--set=interval_s=0.5")
    try:
        targets = [{"targets": [sidecar.url.removeprefix("http://")]}]
        config = {
            "scrape_configs": [{"job_name": "dflash", "static_configs": targets}],
            "rule_files": [str(MONITORING / "prometheus" / "rules" / "*.yml")],
        }
        with prometheus_configured(config, path) as server:
            ready = "increase(dflash_steps_total[15s]) > 20 and on () dflash_tokens_per_joule > 0"
            wait_for(lambda: bool(server.values(ready)), "training", timeout_s=90)
            machine.raise_xid(1, 31)
            wait_for(lambda: bool(server.values("dflash_gpu_xid_errors_total == 1")), "the XID error", timeout_s=30)
            wait_for(lambda: bool(server.values("count_over_time(dflash_gpu_up[1m]) > 8")), "scrapes", timeout_s=30)
            yield server
    finally:
        place.close()


def test_every_query_returns_data(prometheus: PrometheusServer) -> None:
    """No panel is empty but those that are named, with the reason."""
    empty = [query.name for query in committed_queries() if not prometheus.values(query.expression)]

    assert [name for name in empty if not any(part in name for part in MAY_BE_EMPTY)] == []


def test_panels_of_definitions_return_data(prometheus: PrometheusServer, place: Place) -> None:
    """What `dflash-sidecar dashboard` writes for definitions is answered too; here for the shipped ones."""
    names = [definition.name for definition in load(SHIPPED_FILE, CATALOGUE).definitions]
    document = json.loads(place.command("dashboard", *names).stdout)
    empty = [query.title for query in queries_of("custom", document) if not prometheus.values(query.expression)]

    assert [panel["title"] for panel in document["panels"]] == names
    assert empty == ["dflash_cuda_allocator_fragmentation_ratio"]


def test_rules_are_evaluated_without_an_error(prometheus: PrometheusServer) -> None:
    """No shipped rule fails on the series of a real run, what can be recorded is, and no alert fires."""
    with urllib.request.urlopen(f"http://127.0.0.1:{prometheus.port}/api/v1/rules") as response:
        groups = json.load(response)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]

    assert len(rules) > 30
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert [name for name in recorded if not prometheus.values(name)] == []
    assert prometheus.values('ALERTS{alertstate="firing"}') == []


def test_list_of_empty_queries_is_current() -> None:
    """Each exception still names a query."""
    names = [query.name for query in committed_queries()]

    assert [part for part in MAY_BE_EMPTY if not any(part in name for name in names)] == []
