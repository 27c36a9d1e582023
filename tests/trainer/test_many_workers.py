"""Several targets and drafters in one process, and several processes: the same training, only faster."""

import json
import os
import signal
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sidecar_process import wait_for
from training_run import short_run

from trainer.app import main
from trainer.drafter_worker import DrafterWorker
from trainer.pipeline import Pipeline
from trainer.target_worker import TargetWorker
from trainer.transfers import HiddenBatch

pytestmark = pytest.mark.usefixtures("own_runtime_dir")
STEPS = 6
TWO = '["cpu", "cpu"]'
MANY = (f"--set=devices.targets={TWO}", f"--set=devices.drafters={TWO}")


def arguments(small_target: Path, out_dir: Path, *extra: str) -> list[str]:
    """A short run of four batches a step."""
    settings: dict[str, object] = {
        "train__steps": STEPS,
        "train__batch_size": 2,
        "train__accumulate": 4,
        "evaluation__num_prompts": 0,
        "telemetry__enabled": "false",
        "devices__cpu_threads": 1,
    }
    return short_run(small_target, out_dir, *extra, **settings)


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of the newest checkpoint."""
    checkpoints = out_dir / "checkpoints"
    return load_file(checkpoints / (checkpoints / "latest").read_text() / "drafter.safetensors")


def difference(left: Path, right: Path) -> float:
    """The largest difference of any weight."""
    left_weights, right_weights = weights(left), weights(right)
    return max(float((tensor - right_weights[name]).abs().max()) for name, tensor in left_weights.items())


def launcher(num_processes: int) -> list[str]:
    """The trainer in several processes of this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return [*torchrun, "-m", "trainer.app"]


def torchrun(num_processes: int, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run it to its end; most of the time goes into loading torch in each process."""
    return subprocess.run(
        [*launcher(num_processes), *command], capture_output=True, text=True, timeout=120, check=False
    )


def test_two_by_two_train_what_one_by_one_does(small_target: Path, tmp_path: Path) -> None:
    """After six steps the weights of 2 x 2 workers are those of one pair, up to the order of additions."""
    main(arguments(small_target, tmp_path / "one"))
    main(arguments(small_target, tmp_path / "many", *MANY))

    assert 0 < difference(tmp_path / "one", tmp_path / "many") < 1e-5


def test_gradients_are_those_of_the_concatenated_batch(
    small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four batches over 2 x 2 workers, and the same eight sequences over one pair, in turn and as one batch."""
    gradients: dict[str, torch.Tensor] = {}
    shapes: list[int] = []
    count = DrafterWorker._count

    def keep(worker: DrafterWorker, *arguments: object) -> None:
        gradients[name] = worker._flat.gradients.clone()
        count(worker, *arguments)  # type: ignore[arg-type]  # passed through

    hidden = TargetWorker._hidden

    def look(worker: TargetWorker, batch: object, *arguments: object) -> HiddenBatch:
        shapes.append(len(batch.lengths))  # type: ignore[attr-defined]  # a Batch
        return hidden(worker, batch, *arguments)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(DrafterWorker, "_count", keep)
    monkeypatch.setattr(TargetWorker, "_hidden", look)
    # Eight sequences in all, and every possible anchor is drawn, so that no random number matters. One step.
    data = tmp_path / "eight.jsonl"
    lines = (small_target / "train.jsonl").read_text().splitlines()[:9]
    data.write_text("\n".join(lines))
    common = (f"--set=data.path={data}", "--set=data.num_held_out=1", "--set=train.num_anchors=200")
    common += ("--set=train.grad_clip=1e9", "--max-steps=1", "--set=queue.hs_min_ready=1")
    name = "many"
    main(arguments(small_target, tmp_path / name, *common, *MANY))
    name = "in turn"
    main(arguments(small_target, tmp_path / name, *common, "--set=train.batch_size=2", "--set=train.accumulate=4"))
    name = "at once"
    main(arguments(small_target, tmp_path / name, *common, "--set=train.batch_size=8", "--set=train.accumulate=1"))

    assert {2, 8} <= set(shapes)
    norm = float(gradients["at once"].norm())
    assert norm > 1e-3
    assert float((gradients["many"] - gradients["in turn"]).norm()) <= 1e-6 * norm
    # Products of other shapes are rounded otherwise, in the target's layers and in the drafter's.
    assert float((gradients["many"] - gradients["at once"]).norm()) <= 5e-6 * norm


def test_many_workers_resume_to_the_bit(small_target: Path, tmp_path: Path) -> None:
    """2 x 2 workers, stopped and resumed with another number of targets, end like a run never stopped, to the bit."""
    main(arguments(small_target, tmp_path / "whole", *MANY))
    main(arguments(small_target, tmp_path / "broken", *MANY, "--max-steps=3"))
    assert main(["--resume", "--out", str(tmp_path / "broken"), '--set=devices.targets=["cpu", "cpu", "cpu"]']) == 0

    assert difference(tmp_path / "whole", tmp_path / "broken") == 0


def test_resume_with_fewer_drafters_goes_on(small_target: Path, tmp_path: Path) -> None:
    """A run of two drafters goes on with one, and trains the same up to rounding."""
    main(arguments(small_target, tmp_path / "whole", *MANY))
    main(arguments(small_target, tmp_path / "broken", *MANY, "--max-steps=3"))
    assert main(["--resume", "--out", str(tmp_path / "broken"), "--set=devices.drafters=[]"]) == 0

    assert difference(tmp_path / "whole", tmp_path / "broken") < 1e-5


@pytest.mark.parametrize(("worker", "method"), [(TargetWorker, "_hidden"), (DrafterWorker, "_learn")])
def test_a_dead_worker_ends_the_run_with_its_own_error(
    small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: type, method: str
) -> None:
    """One worker of four fails in the middle, the others wait for it: the run ends, with that worker's error."""
    original, calls = getattr(worker, method), []

    def fail_later(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 9:
            raise RuntimeError("this GPU has fallen off the bus")
        return original(*arguments)

    monkeypatch.setattr(worker, method, fail_later)

    with pytest.raises(RuntimeError, match="this GPU has fallen off the bus"):
        main(arguments(small_target, tmp_path / "run", *MANY))


def test_steps_that_do_not_divide_are_refused(
    small_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four batches a step among three drafters: one line; without `train.accumulate` each drafter gets one."""
    three = '--set=devices.drafters=["cpu", "cpu", "cpu"]'
    status = main(arguments(small_target, tmp_path / "refused", three))
    error = capsys.readouterr().err
    main(arguments(small_target, tmp_path / "run", three, "--set=train.accumulate=0", "--max-steps=1"))

    assert status == 2
    assert "train.accumulate=4 does not divide among 3 drafters" in error
    assert not (tmp_path / "refused").exists()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["accumulate"] == 3


def test_two_processes_train_what_one_does(small_target: Path, tmp_path: Path) -> None:
    """1. Two processes to step 3. 2. The same to the end. 3. From step 3 with one process. Result: as one process."""
    main(arguments(small_target, tmp_path / "one", "--set=queue.hs_min_ready=1"))
    two = arguments(small_target, tmp_path / "two", "--set=queue.hs_min_ready=1", "--max-steps=3")
    done = torchrun(2, *two)
    assert done.returncode == 0, done.stderr
    assert main(["--resume", "--out", str(tmp_path / "two"), "--set=telemetry.enabled=false"]) == 0

    assert difference(tmp_path / "one", tmp_path / "two") < 1e-5
    assert json.loads((tmp_path / "two" / "report.json").read_text())["steps"] == STEPS


@pytest.mark.slow
def test_two_processes_resume_to_the_bit(small_target: Path, tmp_path: Path) -> None:
    """Two processes that choose among three batches, stopped and resumed, end in the bits of an unbroken run."""
    assert torchrun(2, *arguments(small_target, tmp_path / "whole")).returncode == 0
    assert torchrun(2, *arguments(small_target, tmp_path / "broken", "--max-steps=3")).returncode == 0
    done = torchrun(2, "--resume", "--out", str(tmp_path / "broken"), "--set=telemetry.enabled=false")

    assert done.returncode == 0, done.stderr
    assert difference(tmp_path / "whole", tmp_path / "broken") == 0


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_it_goes_on(small_target: Path, tmp_path: Path) -> None:
    """1. Kill -9 one of two processes. 2. Resume. Result: the other ends too, and the run goes on as it was saved."""
    out_dir = tmp_path / "run"
    endless = arguments(small_target, out_dir, "--set=train.steps=100000", "--set=checkpoint.every_steps=2")
    with subprocess.Popen([*launcher(2), *endless], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_for((out_dir / "checkpoints" / "latest").exists, "a checkpoint")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert process.wait(60) != 0
    saved = int((out_dir / "checkpoints" / "latest").read_text().removeprefix("step-"))

    assert main(["--resume", "--out", str(out_dir), f"--max-steps={saved + 2}"]) == 0
    assert (out_dir / "checkpoints" / "latest").read_text() == f"step-{saved + 2:08d}"


def test_hs_min_ready_shapes_the_mix_of_lengths(
    small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over half an epoch the published histogram of lengths moves to long ones with hs_min_ready 1, 8, 32."""
    histograms: list[list[float]] = []
    close = Pipeline.close

    def keep(pipeline: Pipeline, exit_code: int) -> None:
        for cell, family, _ in pipeline._cells.schema().layout():
            if family.name == "dflash_sequence_length_tokens":
                values = array("d", pipeline._cells.snapshot())
                histograms.append(list(values[cell : cell + len(family.buckets) + 2]))
        close(pipeline, exit_code)

    monkeypatch.setattr(Pipeline, "close", keep)
    # A hundred samples of 20 to 119 tokens.
    data = tmp_path / "mixed.jsonl"
    lengths = [20 + (37 * index) % 100 for index in range(101)]
    data.write_text("\n".join(json.dumps({"input_ids": [7] * n, "prompt_length": 4}) for n in lengths))
    for window in (1, 8, 32):
        extra = (f"--set=data.path={data}", "--set=queue.max_items=32", f"--set=queue.hs_min_ready={window}")
        extra += ("--set=data.num_held_out=1", "--set=train.batch_size=1", "--set=train.steps=25", "--max-steps=12")
        main(arguments(small_target, tmp_path / str(window), *extra))

    means = [histogram[-1] / sum(histogram[:-1]) for histogram in histograms]
    short = [histogram[0] for histogram in histograms]
    assert [sum(histogram[:-1]) for histogram in histograms] == [48.0] * 3
    assert means == sorted(means)
    assert means[2] > means[0] + 5
    assert short[0] > short[2]
