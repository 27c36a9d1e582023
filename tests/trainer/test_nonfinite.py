"""Samples with hidden states that are not finite are left out and counted, and training goes on."""

from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_run import trainer_arguments

from trainer.app import main
from trainer.nonfinite import leave_out_nonfinite
from trainer.pipeline import Pipeline
from trainer.target import Target, TargetOutput

STEPS = 4
NUM_POISONED = 5
MANY = ('--set=devices.targets=["cpu", "cpu"]', '--set=devices.drafters=["cpu", "cpu"]')


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_broken_value_takes_its_sample_out(value: float) -> None:
    """The sample's weights and hidden states are zero, the others are as they were, and one is counted."""
    hidden, loss_weights = torch.randn(3, 4, 5), torch.rand(3, 2, 4) + 0.1
    broken = hidden.clone()
    broken[1, 3, 2] = value

    kept = leave_out_nonfinite(broken, loss_weights)

    assert kept.num_skipped.item() == 1
    assert not kept.hidden[1].any()
    assert not kept.weights[1].any()
    assert torch.equal(kept.hidden[[0, 2]], hidden[[0, 2]])
    assert torch.equal(kept.weights[[0, 2]], loss_weights[[0, 2]])


@pytest.mark.parametrize("workers", [(), MANY], ids=["one", "many"])
def test_training_goes_on_without_poisoned_samples(
    workers: tuple[str, ...], small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of each of the first five batches is poisoned: five are counted, no step is lost, weights are finite."""
    clean, calls, pipelines = Target.forward, count(), []
    close = Pipeline.close

    def poisoned(target: Target, input_ids: Tensor, *, attention_mask: Tensor | None = None) -> TargetOutput:
        output = clean(target, input_ids, attention_mask=attention_mask)
        if next(calls) < NUM_POISONED:
            output.layers[0][0, 0, 0] = float("nan")
        return output

    def remember(pipeline: Pipeline, exit_code: int) -> None:
        pipelines.append(pipeline)
        close(pipeline, exit_code)

    monkeypatch.setattr(Target, "forward", poisoned)
    monkeypatch.setattr(Pipeline, "close", remember)
    settings: dict[str, object] = {
        "train__steps": STEPS,
        "train__batch_size": 2,
        "train__accumulate": 4,
        "telemetry__enabled": "false",
        "devices__cpu_threads": 1,
    }
    _, _, *arguments = trainer_arguments(small_target, tmp_path, **settings)
    main([*arguments, *workers])

    (pipeline,) = pipelines
    assert pipeline.state.step == STEPS
    assert pipeline.mailbox._skipped_hidden.value == NUM_POISONED
    assert pipeline.mailbox._skipped.value == 0
    assert all(bool(torch.isfinite(weight).all()) for weight in pipeline.drafter.parameters())
