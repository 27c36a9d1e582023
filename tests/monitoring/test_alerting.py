"""Three faults of a real sidecar's world reach whoever is to be woken through Prometheus and Alertmanager, and pass."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from alertmanager_server import Recipient, alertmanager_binary, alertmanager_telling
from monitoring_queries import MONITORING
from nvml_machine import machine_of
from prometheus_server import prometheus_configured
from sidecar_process import ROOT, Place, wait_for

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
    pytest.mark.skipif(alertmanager_binary() is None, reason="prometheus-alertmanager is not installed"),
]

ALERTS = {"DflashTrainerDown", "DflashGpuLost", "DflashDefinitionsRefused"}
OPTIONS = ("collectors.interval_s=0.2", "collectors.gpu_probe_s=0.5", "interval_s=0.2")


@pytest.fixture
def recipient() -> Iterator[Recipient]:
    """Somebody to be told."""
    recipient = Recipient()
    yield recipient
    recipient.close()


def impatient_rules(folder: Path) -> Path:
    """The three alerts as they are shipped, but after one second instead of up to one minute."""
    shipped = [yaml.safe_load(file.read_text()) for file in (MONITORING / "prometheus" / "rules").glob("alerts-*.yml")]
    rules = [rule for document in shipped for group in document["groups"] for rule in group["rules"]]
    chosen = [rule | {"for": "1s"} for rule in rules if rule["alert"] in ALERTS]
    file = folder / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "impatient", "rules": chosen}]}))
    return file


def test_faults_are_told_and_their_end_too(place: Place, recipient: Recipient, tmp_path: Path) -> None:
    """1. The trainer goes, a GPU is lost, a file is wrong. 2. All is mended. Result: told both times."""
    machine = machine_of(place.environ, tmp_path, 2)
    definitions = tmp_path / "metrics.toml"
    shutil.copy(ROOT / "sidecar" / "metrics.toml", definitions)
    trainer = place.trainer()
    sidecar = place.sidecar("--definitions", str(definitions), *(f"--set={option}" for option in OPTIONS))
    target = sidecar.url.removeprefix("http://")
    with alertmanager_telling(recipient, tmp_path) as address:
        config = {
            "scrape_configs": [{"job_name": "dflash", "static_configs": [{"targets": [target]}]}],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [address]}]}]},
            "rule_files": [str(impatient_rules(tmp_path))],
        }
        with prometheus_configured(config, tmp_path) as prometheus:
            well = "dflash_trainer_up == 1 and on () count(dflash_gpu_up == 1) == 2"
            wait_for(lambda: bool(prometheus.values(well)), "a scrape of a healthy node", timeout_s=30)
            assert recipient.names("firing") == set()

            trainer.stop()
            machine.set(gpu1__gone=15)
            good = definitions.read_text()
            definitions.write_text(good.replace("dflash_queue_depth", "dflash_queue_debth"))
            wait_for(lambda: recipient.names("firing") == ALERTS, "all three alerts", timeout_s=60)
            assert recipient.names("resolved") == set()

            place.trainer("next")
            machine.set(gpu1__gone=None)
            definitions.write_text(good)
            wait_for(lambda: recipient.names("resolved") == ALERTS, "the end of all three", timeout_s=60)

    told = {alert["alertname"]: alert for alert in recipient.messages("firing")}
    assert told["DflashGpuLost"]["uuid"] == "GPU-1"
    assert target in told["DflashTrainerDown"]["summary"]
    assert told["DflashDefinitionsRefused"]["action"].startswith("dflash-sidecar status says why")
