"""AdamW, or Muon for the matrices with AdamW for the rest, behind one learning-rate schedule.

Muon orthogonalises each matrix's momentum before it steps. On a small drafter it needs a third of the steps that AdamW
does to the same acceptance length; AdamW is what the published drafters used, and the default. Both keep fp32 moments
of fp32 parameters.

A gradient that is not finite must not reach the weights, and the host must not wait to find out: where the norm is not
finite the gradients are replaced by zeros on the device. The mailbox counts such steps when the norm has landed.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.config import TrainConfig

MATRIX_NDIM = 2


def schedule(step: int, settings: TrainConfig) -> float:
    """Share of the peak learning rate at the step with this number (from 0): linear warm-up, then cosine to zero."""
    warmup = round(settings.warmup_ratio * settings.steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(settings.steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


class DrafterOptimizer:
    """Step a module's parameters. One thread only.

    Args:
        module: fp32 parameters on their final device.
        settings: the optimisation.
    """

    def __init__(self, module: nn.Module, settings: TrainConfig) -> None:
        self._settings = settings
        self._parameters = list(module.parameters())
        matrices = [p for p in self._parameters if p.ndim == MATRIX_NDIM and settings.optimizer == "muon"]
        others = [p for p in self._parameters if p.ndim != MATRIX_NDIM or settings.optimizer == "adamw"]
        decay = settings.weight_decay
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW(others, lr=settings.learning_rate, weight_decay=decay, fused=True)
        }
        if matrices:
            # The update is scaled to the size of AdamW's, so that learning rates mean the same to both.
            self._optimizers["muon"] = torch.optim.Muon(
                matrices, lr=settings.muon_learning_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
            )
        self._peaks = {"adamw": settings.learning_rate, "muon": settings.muon_learning_rate}

    def update(self, step: int) -> Tensor:
        """Clip, step and clear the gradients for the step with this number.

        Returns the norm before clipping, a scalar still on the device.
        """
        grad_norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        nn.utils.clip_grads_with_norm_(self._parameters, self._settings.grad_clip, grad_norm)
        finite = torch.isfinite(grad_norm)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = torch.where(finite, parameter.grad, 0.0)
        share = schedule(step, self._settings)
        for name, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self._peaks[name] * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def state_dict(self) -> dict[str, object]:
        """Moments of all optimizers, for a checkpoint."""
        return {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a checkpoint's moments."""
        for name, optimizer in self._optimizers.items():
            saved = state[name]
            assert isinstance(saved, dict)
            optimizer.load_state_dict(saved)
