"""The drafter worker's schedule and anchors."""

import pytest
import torch

from trainer.config import TrainConfig
from trainer.drafter_worker import anchor_generator, learning_rate


def test_schedule_warms_up_and_falls_to_zero() -> None:
    """Linear to the peak over the warm-up, half way down in the middle of the rest, zero at the end."""
    settings = TrainConfig(steps=100, warmup_ratio=0.1, learning_rate=2.0)

    rates = [learning_rate(step, settings) for step in (0, 9, 10, 55, 100)]

    assert rates == pytest.approx([0.2, 2.0, 2.0, 1.0, 0.0])


def test_seed_and_batch_decide_the_anchors() -> None:
    """The same seed and batch draw the same numbers; another seed, or another batch, draws others."""

    def drawn(seed: int, batch_index: int) -> list[float]:
        return torch.rand(8, generator=anchor_generator(seed, batch_index)).tolist()

    assert drawn(0, 7) == drawn(0, 7)
    assert drawn(0, 7) != drawn(1, 7)
    assert drawn(0, 7) != drawn(0, 8)
