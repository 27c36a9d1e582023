"""The promise: a metric is added to a run that goes on, and nothing is lost, doubled or disturbed.

Everything is real: a trainer that trains, a sidecar process, Prometheus scraping it, and the W&B SDK against a local
server.
"""

import shutil
import signal
from pathlib import Path

import pytest
from fake_wandb import FakeWandb, Run
from prometheus_server import PrometheusServer, prometheus_scraping
from sidecar_process import ROOT, Place, Sidecar, wait_for
from training_run import RUN_ID, last_step, trainer_arguments

NEW_METRIC = """
[[metric]]
name = "dflash_tokens_per_step"
help = "Real tokens the drafter learns from in one step."
type = "gauge"
expr = 'sum(dflash_tokens_total{role="drafter",kind="real"}) / dflash_steps_total'
wandb = "custom/tokens_per_step"
"""


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_metric_is_added_to_a_living_run(
    small_target: Path, place: Place, server: FakeWandb, tmp_path: Path, number: signal.Signals
) -> None:
    """1. Train. 2. Add a metric to metrics.toml. 3. Restart the sidecar. 4. End the run.

    Result: the same training PID; the metric is there at once; no counter fell in Prometheus; W&B has every step once.
    """
    place.environ |= server.environment
    definitions = tmp_path / "metrics.toml"
    shutil.copy(ROOT / "sidecar" / "metrics.toml", definitions)
    options = ("--definitions", str(definitions), "--set=wandb.mode=online", "--set=wandb.interval_s=1")
    trainer = place.popen(*trainer_arguments(small_target, tmp_path / "run"))
    sidecar = place.sidecar(*options)
    port = int(sidecar.url.rsplit(":", 1)[1])
    with prometheus_scraping(port, tmp_path) as prometheus:
        wait_for(lambda: steps_of(sidecar) > 40, "training", timeout_s=60)
        wait_for(lambda: bool(prometheus.values("dflash_steps_total > 40")), "a scrape", timeout_s=30)
        with definitions.open("a") as file:
            file.write(NEW_METRIC)
        sidecar.process.send_signal(number)
        sidecar.process.wait()
        sidecar = place.sidecar(*options, port=port)
        assert sidecar.metrics()["dflash_tokens_per_step"] > 0
        assert sidecar.status()["trainers"][0]["pid"] == trainer.pid
        step_at_restart = steps_of(sidecar)
        wait_for(lambda: steps_of(sidecar) > step_at_restart + 40, "more steps", timeout_s=60)
        wait_for(lambda: bool(prometheus.values("dflash_tokens_per_step")), "a scrape", timeout_s=30)
        assert_no_counter_fell(prometheus)

    assert trainer.poll() is None
    trainer.terminate()
    assert trainer.wait(30) == 128 + signal.SIGTERM
    assert_every_step_once(server.run(RUN_ID), last_step(tmp_path / "run"))


def assert_no_counter_fell(prometheus: PrometheusServer) -> None:
    """As Prometheus has them, the trainer's counters only ever rose."""
    counters = prometheus.values('{__name__=~"dflash_(steps|tokens|batches|phase|queue|anchors).*_total"}[5m]')
    assert len(counters) > 20
    assert [values for values in counters if values != sorted(values)] == []


def assert_every_step_once(run: Run, num_steps: int) -> None:
    """When W&B has seen the end, it has every step once, in order, and the new metric."""
    wait_for(lambda: run.state != "running", "W&B to have everything", timeout_s=60)
    rows = run.history
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    assert [row["train/step"] for row in rows if "train/step" in row] == list(range(1, num_steps + 1))
    assert any("custom/tokens_per_step" in row for row in rows)


def test_weights_do_not_depend_on_the_sidecar(small_target: Path, place: Place, tmp_path: Path) -> None:
    """1. Train alone. 2. Train beside a sidecar that is killed and restarted all the time. Result: the same bits."""
    results = []
    for name, with_sidecar in (("alone", False), ("watched", True)):
        arguments = trainer_arguments(small_target, tmp_path / name)
        trainer = place.popen(*arguments, "--set", f"run.id={name}", "--max-steps", "300")
        while with_sidecar and trainer.poll() is None:
            sidecar = place.sidecar()
            sidecar.metrics()
            sidecar.kill()
        assert trainer.wait(120) == 0
        results.append((tmp_path / name / "checkpoints/step-00000300/drafter.safetensors").read_bytes())

    assert results[0] == results[1]


def steps_of(sidecar: Sidecar) -> int:
    """The step of the only trainer, 0 before it is known."""
    trainers = sidecar.status()["trainers"]
    return int(trainers[0]["step"] or 0) if trainers else 0
