"""Our drafter step, put together as the drafter worker does it."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by

from bench.step.case import GAMMA, GRAD_CLIP, LEARNING_RATE, Case, serve
from trainer.anchors import build_blocks, lay_out
from trainer.drafter import Drafter
from trainer.loss import LossOptions, drafter_loss
from trainer.optimizer import DrafterOptimizer


def make_step(case: Case) -> Callable[[], float]:
    """Return a function that makes one step and returns its loss."""
    drafter = Drafter(case.config)
    drafter.load_state_dict(case.weights)
    drafter.train()
    optimizer = DrafterOptimizer(drafter, "adamw", weight_decay=0.0)

    def step() -> float:
        layout = lay_out(case.loss_mask, case.anchors, case.config)
        blocks = build_blocks(case.input_ids, case.loss_mask, case.anchors, case.config, GAMMA, layout)
        with torch.autocast("cpu", torch.bfloat16):
            noise = F.embedding(blocks.noise_ids, case.embedding_weight)
            hidden = drafter(noise, case.target_hidden, blocks.position_ids, blocks.masks)
            options = LossOptions(slots=blocks.learned_slots)
            loss = drafter_loss(hidden, case.head_weight, blocks.labels, blocks.weights, case.config, options)
        mean = loss.numerator / loss.denominator
        mean.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        grad_norm = nn.utils.clip_grad_norm_(drafter.parameters(), GRAD_CLIP)
        optimizer.step(LEARNING_RATE, grad_norm)
        return mean.item()

    return step


if __name__ == "__main__":
    serve(make_step)
