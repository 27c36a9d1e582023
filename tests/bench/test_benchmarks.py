"""The benchmarks measure what they say: real frames arrive, and the peers really do their work."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from sidecar_process import wait_for

from bench import ingestion, publishing
from bench.contestants import Contestant
from bench.workplace import Workplace, fetch

SETTINGS = {
    "run.id": "bench",
    "target.layer_ids": "[0, 1, 2]",
    "drafter.block_size": 4,
    "train.steps": 1_000_000,
    "train.num_anchors": 4,
    "evaluation.num_prompts": 0,
}
STEPS = 5


@pytest.fixture
def place() -> Iterator[Workplace]:
    """An empty place."""
    with Workplace() as place:
        yield place


def started(place: Workplace, small_target: Path, kind: str, **environ: str) -> Contestant:
    """A trainer instrumented in some way, standing still after a few steps."""
    settings = SETTINGS | {"target.path": small_target, "data.path": small_target / "train.jsonl"}
    arguments = [*(f"--set={key}={value}" for key, value in settings.items()), "--out", str(place.path / "run")]
    contestant = Contestant(place, kind)
    contestant.start(kind, [*arguments, "--telemetry", "off"], environ, steps=STEPS)
    return contestant


def test_contestant_only_trains_in_its_turn(place: Workplace, small_target: Path) -> None:
    """A contestant that stands still makes no steps; in its turn it does, and its speed is that of its steps."""
    contestant = started(place, small_target, "none")
    num_steps = contestant.num_steps

    speed, cpu_s_per_step = contestant.run_for(1.0)
    num_after = contestant.num_steps

    assert num_after > num_steps
    assert 0.2 * speed < num_after - num_steps < 2.0 * speed + 2.0
    assert 0.0 < cpu_s_per_step < 10.0
    with pytest.raises(AssertionError, match="another step"):
        wait_for(lambda: contestant.num_steps > num_after, "another step", timeout_s=0.5)


def test_wandb_in_the_trainer_logs_every_step(place: Workplace, small_target: Path) -> None:
    """The peer is the real SDK: when its trainer has ended, the server has one row per step."""
    server = place.wandb_server()
    contestant = started(place, small_target, "wandb", **server.environ)

    assert contestant.terminate(30.0) < 30.0

    (run,) = json.loads(fetch(server.environ["WANDB_BASE_URL"], "/runs")).values()
    assert [row["train/step"] for row in run["history"]] == list(range(1, contestant.num_steps + 1))
    assert all(row["train/loss"] > 0 for row in run["history"])


def test_wandb_hangs_from_the_step_it_is_told(place: Workplace, small_target: Path) -> None:
    """From then on the server answers nobody: the trainer steps on, and its end waits for W&B."""
    server = place.wandb_server()
    hang = {"BENCH_HANG_STEP": "2", "BENCH_SERVER_PID": str(server.pid)}
    contestant = started(place, small_target, "wandb", **server.environ, **hang)

    assert contestant.terminate(5.0) == 5.0

    assert contestant.num_steps >= STEPS


def test_prometheus_in_the_trainer_serves_the_newest_step(place: Workplace, small_target: Path) -> None:
    """The peer's page counts the steps that were made."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    contestant = started(place, small_target, "prometheus", BENCH_PROMETHEUS_PORT=str(port))
    contestant.run_for(1.0)
    contestant.resume()

    page = fetch(f"http://127.0.0.1:{port}", "/metrics").decode()

    steps = next(float(line.split()[1]) for line in page.splitlines() if line.startswith("dflash_steps_total "))
    assert STEPS < steps <= contestant.num_steps + 1


def test_ingestion_takes_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames and missed records arrive in the journal, all of them, or the benchmark has no figure."""
    monkeypatch.setattr(ingestion, "NUM_FRAMES", 20_000)
    monkeypatch.setattr(ingestion, "NUM_MISSED", 20_000)

    results = ingestion.ingest_frames(1) + ingestion.catch_up(1)

    assert [result.name for result in results] == ["ingest_frames", "ingest_frames_wall", "catch_up"]
    assert all(result.value > 0 for result in results)


def test_each_publish_is_measured_on_the_thread_that_does_it(place: Workplace) -> None:
    """The telemetry thread used less CPU for its publishes than for all it did, and some of it."""
    publish_us, interval_us = publishing.measure_publish(place, "run")

    assert 0.0 < publish_us < interval_us < publishing.PUBLISH_INTERVAL_S * 1e6
