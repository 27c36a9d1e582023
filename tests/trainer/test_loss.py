"""The chunked loss against plain full-logits cross entropy, and the counts against loops."""

import math

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_config
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by

from trainer.drafter_config import DrafterConfig
from trainer.loss import DrafterLoss, LossOptions, Objective, drafter_loss, loss_denominator
from trainer.tiled_head import Tile

NUM_SAMPLES, NUM_BLOCKS, HIDDEN_SIZE = 2, 5, 64


def _inputs(config: DrafterConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, head, labels and weights; a third of the weights is 0."""
    generator = torch.Generator().manual_seed(3)
    shape = (NUM_SAMPLES, NUM_BLOCKS, config.block_size)
    hidden = torch.randn(NUM_SAMPLES, NUM_BLOCKS * config.block_size, HIDDEN_SIZE, generator=generator)
    head_weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator) * 0.3
    labels = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
    weights = torch.rand(shape, generator=generator) * (torch.rand(shape, generator=generator) > 0.33)
    weights[..., 0] = 0
    return hidden.requires_grad_(), head_weight, labels, weights


def _plain(hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor, config: DrafterConfig) -> Tensor:
    logits = F.linear(hidden, head_weight) * config.output_multiplier
    if config.final_logit_softcapping is not None:
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(7, 10), Tile(2**20, 2**20)], ids=["one logit", "some", "all"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"output_multiplier": 0.25}, {"final_logit_softcapping": 5.0, "output_multiplier": 2.0}],
    ids=["plain", "multiplier", "softcap"],
)
def test_loss_and_gradient_equal_full_logits(changes: dict[str, object], tile: Tile) -> None:
    """Whatever the tile, the loss and the gradient of the hidden states are those of plain cross entropy."""
    config = tiny_config(**changes)  # type: ignore[arg-type]
    hidden, head_weight, labels, weights = _inputs(config)
    twin = hidden.detach().clone().requires_grad_()

    loss = drafter_loss(hidden, head_weight, labels, weights, config, LossOptions(tile=tile))
    (loss.numerator / 7.0).backward()
    plain = _plain(twin, head_weight, labels, weights, config)
    (plain / 7.0).backward()

    torch.testing.assert_close(loss.numerator, plain, rtol=1e-5, atol=0)
    torch.testing.assert_close(loss.denominator, weights.sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad, twin.grad, rtol=0, atol=1e-5)
    assert hidden.grad is not None
    assert hidden.grad.view(*labels.shape, -1)[:, :, 0].abs().max() == 0.0


def test_bf16_autocast_follows_fp32() -> None:
    """Under bf16 autocast loss and gradient stay within bf16 rounding of the fp32 ones."""
    config = tiny_config()
    hidden, head_weight, labels, weights = _inputs(config)
    twin = hidden.detach().clone().requires_grad_()

    exact = drafter_loss(hidden, head_weight, labels, weights, config).numerator
    exact.backward()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = drafter_loss(twin, head_weight, labels, weights, config).numerator
    rounded.backward()

    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=1e-2)
    assert hidden.grad is not None
    assert twin.grad is not None
    assert F.cosine_similarity(twin.grad.flatten(), hidden.grad.flatten(), dim=0) > 0.999


def test_bf16_head_with_fp32_hidden() -> None:
    """A head kept in bf16, as a bf16 target has it, works without autocast and gives fp32 gradients."""
    config = tiny_config()
    hidden, head_weight, labels, weights = _inputs(config)

    loss = drafter_loss(hidden, head_weight.bfloat16(), labels, weights, config)
    loss.numerator.backward()

    plain = _plain(hidden, head_weight, labels, weights, config)
    assert loss.numerator.item() == pytest.approx(plain.item(), rel=1e-2)
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


def _loss_of(predicted: list[list[int]], labels: list[list[int]], weights: list[list[float]]) -> DrafterLoss:
    """Drive the loss with one-hot hidden states, so that the head's argmax is exactly `predicted`."""
    config = tiny_config()
    hidden = F.one_hot(torch.tensor([predicted]), HIDDEN_SIZE).float().flatten(1, 2)
    return drafter_loss(hidden, torch.eye(HIDDEN_SIZE), torch.tensor([labels]), torch.tensor([weights]), config)


def test_counts_per_position_and_acceptance() -> None:
    """Correct slots count per position; acceptance is one plus the leading correct slots of complete blocks."""
    loss = _loss_of(
        predicted=[[0, 1, 2, 3], [0, 1, 9, 3], [0, 9, 2, 3], [0, 1, 2, 3]],
        labels=[[5, 1, 2, 3], [5, 1, 2, 3], [5, 1, 2, 3], [5, 1, 2, 3]],
        weights=[[0.0, 1.0, 0.5, 0.2]] * 3 + [[0.0, 1.0, 0.5, 0.0]],
    )

    assert loss.num_correct.tolist() == [3.0, 3.0, 3.0]
    assert loss.num_predicted.tolist() == [4.0, 4.0, 3.0]
    assert loss.num_complete_blocks.item() == 3.0
    assert loss.accept_length_sum.item() == 4.0 + 2.0 + 1.0


def test_nothing_supervised_gives_zeros() -> None:
    """A batch slice without any supervised slot adds nothing, not NaN."""
    loss = _loss_of([[0, 1, 2, 3]], [[0, 1, 2, 3]], [[0.0, 0.0, 0.0, 0.0]])

    assert loss.numerator.item() == 0.0
    assert loss.denominator.item() == 0.0
    assert loss.accept_length_sum.item() == 0.0


def test_split_batches_add_up() -> None:
    """Numerators over two halves, divided by the global denominator, give the gradient of the whole batch."""
    config = tiny_config()
    hidden, head_weight, labels, weights = _inputs(config)
    twin = hidden.detach().clone().requires_grad_()

    whole = drafter_loss(hidden, head_weight, labels, weights, config)
    (whole.numerator / whole.denominator).backward()
    halves = [drafter_loss(twin[i : i + 1], head_weight, labels[i : i + 1], weights[i : i + 1], config) for i in (0, 1)]
    denominator = halves[0].denominator + halves[1].denominator
    for half in halves:
        (half.numerator / denominator).backward()

    torch.testing.assert_close(twin.grad, hidden.grad, rtol=0, atol=1e-7)


def test_slots_that_teach_nothing_may_be_left_out() -> None:
    """Given only the slots with a weight, in any order, every sum and the gradient are what they are without."""
    config = tiny_config()
    hidden, head_weight, labels, weights = _inputs(config)
    twin = hidden.detach().clone().requires_grad_()
    slots = weights.flatten().nonzero()[:, 0].flip(0)

    some = drafter_loss(hidden, head_weight, labels, weights, config, LossOptions(slots=slots))
    every = drafter_loss(twin, head_weight, labels, weights, config)
    some.numerator.backward()
    every.numerator.backward()

    assert slots.numel() < 0.8 * weights.numel()
    torch.testing.assert_close(some.numerator, every.numerator, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad, twin.grad, rtol=0, atol=1e-6)
    for name in ("denominator", "num_correct", "num_predicted", "accept_length_sum", "num_complete_blocks"):
        assert torch.equal(getattr(some, name), getattr(every, name)), name


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weighs_by_what_a_slot_adds(alpha: float) -> None:
    """D-PACE equals its definition written as loops, over sequences, with weights that carry no gradient."""
    config = tiny_config()
    hidden, head_weight, labels, weights = _inputs(config)
    twin = hidden.detach().clone().requires_grad_()
    objective = Objective("dpace", alpha)

    loss = drafter_loss(hidden, head_weight, labels, weights, config, LossOptions(objective=objective))
    (loss.numerator / loss.denominator).backward()

    surprise = -F.linear(twin, head_weight).log_softmax(-1).view(*labels.shape, -1).gather(3, labels[..., None])[..., 0]
    expected = torch.zeros(())
    for sample in range(NUM_SAMPLES):
        for block in range(NUM_BLOCKS):
            slots = [k for k in range(config.block_size) if weights[sample, block, k] > 0]
            confidence = {k: (1 - alpha) * surprise[sample, block, k].neg().exp().item() + alpha for k in slots}
            for j in slots:
                reached = [math.prod(confidence[i] for i in slots if i <= m) for m in slots if m >= j]
                expected = expected + sum(reached) * surprise[sample, block, j]
    (expected / NUM_SAMPLES).backward()

    assert loss.denominator.item() == NUM_SAMPLES == loss_denominator(weights, objective).item()
    torch.testing.assert_close(loss.numerator, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(hidden.grad, twin.grad, rtol=0, atol=1e-5)
