"""The gate: a drafter that saw four texts must draft them perfectly, through training, decoding and verification."""

import pytest
from tiny_models import overfit, random_prompts, tiny_config, tiny_target

from trainer.acceptance import evaluate_drafter


@pytest.mark.parametrize("layout", ["full", "sliding"])
def test_four_texts_are_learned_by_heart(layout: str) -> None:
    """Overfitted on four greedy texts, whole blocks of 4 are accepted in real decoding, losslessly."""
    target, prompts = tiny_target(), random_prompts(4, seed=4)

    drafter, loss = overfit(target, prompts, tiny_config(layout), num_steps=250)
    report = evaluate_drafter(drafter, target, prompts, max_new_tokens=61)

    assert report.lossless
    assert report.accept_length >= 3.9
    assert max(report.histogram) == 4
    assert (loss.accept_length_sum / loss.num_complete_blocks).item() == pytest.approx(4.0, abs=0.05)
