"""The optimizer of a drafter: schedule, both kinds, and gradients that are not finite."""

import msgspec
import pytest
import torch
from torch import nn

from trainer.config import TrainConfig
from trainer.optimizer import DrafterOptimizer, schedule

SETTINGS = TrainConfig(steps=100, warmup_ratio=0.1, learning_rate=0.01, muon_learning_rate=0.01)


def test_schedule_warms_up_and_falls_to_zero() -> None:
    """Linear to the peak over the warm-up, half way down in the middle of the rest, zero at the end."""
    assert [schedule(step, SETTINGS) for step in (0, 9, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert schedule(55, SETTINGS) == pytest.approx(0.5)
    assert schedule(100, SETTINGS) == pytest.approx(0.0)


def test_adamw_is_torch_s_own_with_the_schedule() -> None:
    """A step equals torch's AdamW at the scheduled rate on the clipped gradient."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 4), nn.Linear(4, 4)
    theirs.load_state_dict(ours.state_dict())
    optimizer = DrafterOptimizer(ours, SETTINGS)
    reference = torch.optim.AdamW(theirs.parameters(), weight_decay=0.0)
    for step in range(15):
        x = torch.randn(8, 4)
        for module in (ours, theirs):
            (module(x) ** 2).sum().backward()
        reference.param_groups[0]["lr"] = 0.01 * schedule(step, SETTINGS)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), SETTINGS.grad_clip)
        reference.step()
        reference.zero_grad()
        assert torch.allclose(optimizer.update(step), norm)

    assert torch.allclose(ours.weight, theirs.weight, atol=1e-7)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_gradient_that_is_not_finite_never_reaches_the_weights(kind: str) -> None:
    """1. A good step. 2. A step with a NaN. Result: finite weights, and the norm says so."""
    module = nn.Linear(4, 4)
    optimizer = DrafterOptimizer(module, msgspec.structs.replace(SETTINGS, optimizer=kind))
    module(torch.randn(8, 4)).sum().backward()
    optimizer.update(20)
    module.weight.grad = torch.full_like(module.weight, torch.nan)

    norm = optimizer.update(21)

    assert not torch.isfinite(norm)
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_muon_takes_the_matrices_only() -> None:
    """Vectors stay with AdamW, and both states survive a round trip."""
    module = nn.Linear(4, 4)
    settings = msgspec.structs.replace(SETTINGS, optimizer="muon")
    optimizer, copy = DrafterOptimizer(module, settings), DrafterOptimizer(module, settings)
    module(torch.randn(8, 4)).sum().backward()
    optimizer.update(20)

    copy.load_state_dict(optimizer.state_dict())

    assert optimizer.state_dict().keys() == {"adamw", "muon"}
    assert str(copy.state_dict()) == str(optimizer.state_dict())
