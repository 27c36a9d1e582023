"""The drafter's optimizer."""

import io

import pytest
import torch
from torch import Tensor, nn

from trainer.optimizer import DrafterOptimizer, OptimizerName

BOTH = pytest.mark.parametrize("name", ["adamw", "muon"])


def make_model() -> nn.Module:
    """Two matrices and two vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.RMSNorm(16), nn.Linear(16, 4, bias=False), nn.RMSNorm(4))


def set_gradients(model: nn.Module, step: int, scale: float = 1.0) -> Tensor:
    """Give every parameter a gradient that depends on the step only; return the norm of all."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def run(model: nn.Module, optimizer: DrafterOptimizer, steps: range) -> None:
    """Take steps at a learning rate of 0.1."""
    for step in steps:
        optimizer.step(0.1, set_gradients(model, step))


class TestDrafterOptimizer:
    """Updates, safety and resuming."""

    def test_adamw_is_adamw(self) -> None:
        """Without Muon the updates are those of torch's plain AdamW on all parameters."""
        model, reference = make_model(), make_model()
        run(model, DrafterOptimizer(model, "adamw", weight_decay=0.1), range(5))
        plain = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.1)
        for step in range(5):
            set_gradients(reference, step)
            plain.step()

        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)

    def test_muon_turns_matrices_only(self) -> None:
        """Muon's update of a matrix has singular values near one another; vectors are updated as by AdamW."""
        model, adamw, before = make_model(), make_model(), make_model()
        run(model, DrafterOptimizer(model, "muon", weight_decay=0.0), range(1))
        run(adamw, DrafterOptimizer(adamw, "adamw", weight_decay=0.0), range(1))
        pairs = zip(model.parameters(), adamw.parameters(), before.parameters(), strict=True)
        for mine, theirs, start in pairs:
            if mine.ndim == 2:
                values = torch.linalg.svdvals(mine.detach() - start.detach())
                assert float(values.max() / values.min()) < 2
                assert float(torch.linalg.cond(theirs.detach() - start.detach())) > 2
            else:
                torch.testing.assert_close(mine, theirs)

    @BOTH
    @pytest.mark.parametrize("scale", [float("nan"), float("inf")])
    def test_a_gradient_that_is_not_finite_does_no_harm(self, name: OptimizerName, scale: float) -> None:
        """Broken gradients leave fresh parameters where they are, and later steps work."""
        model = make_model()
        optimizer = DrafterOptimizer(model, name, weight_decay=0.0)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step(0.1, set_gradients(model, 0, scale))
        after = [parameter.detach().clone() for parameter in model.parameters()]
        run(model, optimizer, range(1, 3))

        assert all(torch.equal(a, b) for a, b in zip(start, after, strict=True))
        assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
        assert not any(torch.equal(a, b) for a, b in zip(after, model.parameters(), strict=True))

    @BOTH
    @pytest.mark.parametrize("scale", [float("nan"), float("inf")])
    def test_a_skipped_step_leaves_no_trace(self, name: OptimizerName, scale: float) -> None:
        """With momentum and weight decay at work, a broken gradient in between changes no later bit."""
        poisoned, clean = make_model(), make_model()
        first = DrafterOptimizer(poisoned, name, weight_decay=0.1)
        second = DrafterOptimizer(clean, name, weight_decay=0.1)
        run(poisoned, first, range(3))
        first.step(0.1, set_gradients(poisoned, 99, scale))
        run(poisoned, first, range(3, 6))
        run(clean, second, range(6))

        for mine, theirs in zip(poisoned.parameters(), clean.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        for part, state in second.state_dict().items():
            assert isinstance(state, dict)
            found = first.state_dict()[part]
            assert isinstance(found, dict)
            torch.testing.assert_close(found["state"], state["state"], rtol=0, atol=0)

    @BOTH
    def test_resumed_run_is_bit_equal(self, name: OptimizerName) -> None:
        """Stopping, saving and continuing ends with the same weights as never stopping."""
        whole, first = make_model(), make_model()
        run(whole, DrafterOptimizer(whole, name, weight_decay=0.1), range(8))
        stopped = DrafterOptimizer(first, name, weight_decay=0.1)
        run(first, stopped, range(3))
        file = io.BytesIO()
        torch.save(stopped.state_dict(), file)
        file.seek(0)
        second = make_model()
        second.load_state_dict(first.state_dict())
        resumed = DrafterOptimizer(second, name, weight_decay=0.1)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        run(second, resumed, range(3, 8))

        for mine, theirs in zip(second.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    def test_other_kind_of_state_is_an_error(self) -> None:
        """A checkpoint of the other optimizer is refused with the setting's name."""
        model = make_model()
        state = DrafterOptimizer(model, "adamw", weight_decay=0.0).state_dict()

        with pytest.raises(ValueError, match=r"made with adamw, train\.optimizer asks for adamw and muon; resume with"):
            DrafterOptimizer(model, "muon", weight_decay=0.0).load_state_dict(state)
