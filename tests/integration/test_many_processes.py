"""A run of two processes with several workers each, under one real sidecar."""

import signal
from pathlib import Path

import pytest
from sidecar_process import Place, wait_for
from training_run import RUN_ID, last_step, trainer_arguments

WORKERS = {
    "devices__targets": '["cpu", "cpu"]',
    "devices__drafters": '["cpu", "cpu"]',
    "train__accumulate": 4,
    "train__batch_size": 2,
    "devices__cpu_threads": 1,
}


@pytest.mark.slow
def test_one_sidecar_shows_every_worker_of_every_process(place: Place, small_target: Path, tmp_path: Path) -> None:
    """Each worker has its own series under its rank; after SIGTERM both processes end at one step, without an error."""
    sidecar = place.sidecar()
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run = place.popen(*launcher, *trainer_arguments(small_target, tmp_path / "run", **WORKERS))
    wait_for(lambda: sidecar.metrics().get('dflash_steps_total{rank="1"}', 0) >= 5, "five steps")
    shown = sidecar.metrics()
    trainers = sidecar.status()["trainers"]
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=60)
    wait_for(lambda: not any(trainer["up"] for trainer in sidecar.status()["trainers"]), "the goodbyes")

    for rank in "01":
        for worker in "01":
            for role in ("target", "drafter"):
                series = f'dflash_batches_total{{rank="{rank}",role="{role}",worker="{worker}"}}'
                assert shown[series] > 0, series
        steps = shown[f'dflash_steps_total{{rank="{rank}"}}']
        learned = shown[f'dflash_batches_total{{rank="{rank}",role="drafter",worker="1"}}']
        # A worker counts its batch a moment before or after the step is counted.
        assert abs(learned - steps) <= 1
    assert {(trainer["run_id"], trainer["rank"]) for trainer in trainers} == {(RUN_ID, 0), (RUN_ID, 1)}
    assert f"saved at step {last_step(tmp_path / 'run')};" in output
    assert "Error" not in output
