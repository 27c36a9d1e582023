"""A whole forward and backward pass as the drafter worker runs it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_config
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.anchors import build_blocks, lay_out, sample_anchors
from trainer.drafter import Drafter
from trainer.loss import LossOptions, Objective, ObjectiveName, drafter_loss

_ATEN = torch.ops.aten
WAITING_OPERATIONS = {
    _ATEN._local_scalar_dense.default,
    _ATEN.equal.default,
    _ATEN.masked_select.default,
    _ATEN.nonzero.default,
}


class NoWaiting(TorchDispatchMode):
    """Fail on any operation whose result the host must wait for when the tensors are on a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` unless it waits."""
        assert func not in WAITING_OPERATIONS, f"{func} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("objective", ["decay", "dpace"])
def test_step_never_makes_the_host_wait(objective: ObjectiveName) -> None:
    """From drawn and laid out anchors to gradients, nothing reads a value back, so a GPU is never drained."""
    config = tiny_config("sliding", final_logit_softcapping=30.0, output_multiplier=0.5)
    drafter = Drafter(config)
    loss_mask = torch.ones(2, 20)
    anchors = sample_anchors(loss_mask, 4, torch.Generator().manual_seed(0))
    layout = lay_out(loss_mask, anchors, config)
    input_ids, embedding = torch.zeros(2, 20, dtype=torch.long), torch.randn(VOCAB_SIZE, 64)
    target_hidden = torch.randn(2, 20, 3 * 64)

    with NoWaiting():
        with torch.autocast("cpu", torch.bfloat16):
            blocks = build_blocks(input_ids, loss_mask, anchors, config, 4.0, layout)
            noise_embedding = F.embedding(blocks.noise_ids, embedding)
            hidden = drafter(noise_embedding, target_hidden, blocks.position_ids, blocks.masks)
            options = LossOptions(objective=Objective(objective), slots=blocks.learned_slots)
            loss = drafter_loss(hidden, embedding, blocks.labels, blocks.weights, config, options)
        (loss.numerator / loss.denominator).backward()
        with pytest.raises(AssertionError, match="makes the host wait"):
            loss.numerator.item()

    assert drafter.fc.weight.grad is not None
    assert drafter.fc.weight.grad.isfinite().all()
