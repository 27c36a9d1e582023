"""What drafted blocks cost and how far they would be accepted, from one pass through the target's frozen output head.

The result is a sum, not a mean: the caller adds up denominators over micro-batches and workers and calls
`(numerator / total_denominator).backward()`. Everything stays on the device. Slots that teach nothing - the anchor's,
those past the end of a text, whole blocks of padding - are left out before the head, whose cost is the step's largest.

Two objectives:

* `decay`: slot k of every block weighs exp(-(k-1)/gamma), and the denominator is the sum of these weights.
* `dpace` (arXiv 2605.18810): a slot weighs what getting it right adds to the expected acceptance length. With
  p_k = (1-alpha) * probability of the label + alpha, that is the sum over all supervised m >= k of p_1 * ... * p_m,
  taken as a constant. The denominator is the number of sequences.

Shapes: B samples, N blocks, K block size, Q = N*K, R learned slots, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trainer.drafter_config import DrafterConfig
from trainer.tiled_head import HeadScale, Tile, cross_entropy

ObjectiveName = Literal["decay", "dpace"]


class Objective(NamedTuple):
    """What is minimised."""

    name: ObjectiveName = "decay"
    dpace_alpha: float = 0.5


DECAY = Objective()


class LossOptions(NamedTuple):
    """What callers may leave as it is."""

    objective: Objective = DECAY
    slots: Tensor | None = None
    """[R] places in the flattened [B, N, K], at least of all slots whose weight is not 0; None takes all but the
    anchors' own, which takes longer and gives the same."""
    tile: Tile | None = None
    """Bound on the logits held at a time; None takes the device's."""


DEFAULT_OPTIONS = LossOptions()


@dataclass(frozen=True, kw_only=True)
class DrafterLoss:
    """Sums over one batch; scalars and [K-1] vectors in float32 on the device of the hidden states."""

    numerator: Tensor
    """Sum of weight * cross entropy; the only field with a gradient."""
    denominator: Tensor
    """What `loss_denominator` says."""
    num_correct: Tensor
    """[K-1] supervised slots 1..K-1 whose most likely token is the label."""
    num_predicted: Tensor
    """[K-1] supervised slots 1..K-1."""
    accept_length_sum: Tensor
    """Tokens a verifier holding the labels would gain, 1 + leading correct slots, summed over complete blocks."""
    num_complete_blocks: Tensor
    """Blocks supervised in every slot 1..K-1."""


def loss_denominator(weights: Tensor, objective: Objective = DECAY) -> Tensor:
    """What the numerators over `weights` [B, N, K] are to be divided by, before batches are added up."""
    if objective.name == "decay":
        return weights[:, :, 1:].sum()
    return torch.full((), float(weights.shape[0]), device=weights.device)


def drafter_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    config: DrafterConfig,
    options: LossOptions = DEFAULT_OPTIONS,
) -> DrafterLoss:
    """Compute loss sums and acceptance counts of drafted blocks.

    Args:
        hidden: [B, Q, H] drafter output.
        head_weight: [V, H] frozen head of the target. Logits are computed in autocast's dtype if it is on, else in the
            head's own; the softmax is fp32.
        labels: [B, N, K] as in BlockBatch.
        weights: [B, N, K] as in BlockBatch.
        config: gives output_multiplier and final_logit_softcapping.
        options: the objective, and how it is computed.
    """
    objective = options.objective
    slots = _all_drafted(labels) if options.slots is None else options.slots
    scale = HeadScale(config.output_multiplier, config.final_logit_softcapping)
    rows, learned = hidden.flatten(0, 1).index_select(0, slots), labels.flatten()[slots]
    losses, predictions = cross_entropy(rows, head_weight, learned, scale, options.tile)
    shape = (-1, config.block_size)
    supervised = weights.view(shape)[:, 1:] > 0
    hits = torch.zeros(labels.numel(), dtype=torch.bool, device=labels.device)
    correct = hits.index_copy_(0, slots, predictions == learned).view(shape)[:, 1:] & supervised
    complete = supervised.all(dim=1)
    accept_lengths = 1 + correct.cumprod(dim=1).sum(dim=1)
    slot_weights = weights
    if objective.name == "dpace":
        surprise = torch.zeros(labels.numel(), device=labels.device).index_copy_(0, slots, losses.detach())
        slot_weights = _dpace_weights(surprise.view_as(weights), weights, objective.dpace_alpha)
    return DrafterLoss(
        numerator=(losses * slot_weights.flatten()[slots]).sum(),
        denominator=loss_denominator(weights, objective),
        num_correct=correct.sum(dim=0).float(),
        num_predicted=supervised.sum(dim=0).float(),
        accept_length_sum=(accept_lengths * complete).sum().float(),
        num_complete_blocks=complete.sum().float(),
    )


def _all_drafted(labels: Tensor) -> Tensor:
    places = torch.arange(labels.numel(), device=labels.device)
    return places.view(-1, labels.shape[-1])[:, 1:].flatten()


def _dpace_weights(losses: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Weights [B, N, K] of the slots, from their cross entropies; those of weight 0 count for nothing."""
    supervised = weights > 0
    confidence = torch.where(supervised, (1 - alpha) * torch.exp(-losses) + alpha, 1.0)
    reached = confidence.cumprod(dim=-1) * supervised
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * supervised
