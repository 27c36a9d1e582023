"""Checkpoints on disk, wherever they were made."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_config
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainer.checkpoint import Checkpoint, CheckpointStore, TrainState
from trainer.drafter import Drafter
from trainer.optimizer import DrafterOptimizer, OptimizerName


def tensors_of(state: dict[str, object]) -> list[Tensor]:
    """All moments, in order."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_resumes_where_its_gpu_does_not_exist(
    optimizer: OptimizerName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A checkpoint is written as on the eighth GPU. 2. It is read here. Result: the same moments, on the host."""
    drafter = Drafter(tiny_config("sliding"))
    trained = DrafterOptimizer(drafter, optimizer, weight_decay=0.0)
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    trained.step(0.1, torch.tensor(1.0))
    written = Checkpoint(
        weights=drafter.state_dict(), geometry=drafter.config, optimizer=trained.state_dict(), state=TrainState()
    )
    # What torch writes beside a tensor of a GPU; it asks for that device when it reads.
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _storage: "cuda:7")
        CheckpointStore(tmp_path, keep=1).save(written)

    read = CheckpointStore(tmp_path, keep=1).load_latest()
    resumed = DrafterOptimizer(drafter, optimizer, weight_decay=0.0)
    resumed.load_state_dict(read.optimizer)

    assert b"cuda:7" in next(tmp_path.rglob("optimizer.pt")).read_bytes()
    torch.testing.assert_close(tensors_of(resumed.state_dict()), tensors_of(written.optimizer), rtol=0, atol=0)
