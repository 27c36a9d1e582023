"""Turn a batch of token sequences into drafting blocks to train on.

An anchor is a known token; its block asks the drafter for the `block_size - 1` tokens that follow. Anchors are drawn
afresh at every step, from positions where both the anchor and its successor are supervised. Each sample always
gets exactly `num_anchors` slots, so shapes never change from step to step; slots that could not be filled are padded
blocks with `keep` False, weight 0, and a view of nothing but themselves (a query without a single visible key
would turn into NaN and poison its sample).

A block that runs past the end of its text is kept and only its missing labels are dropped: that is what trains the
tokens near the end. Padding needs no lengths: it is what `loss_mask` marks 0, and no anchor, label or
visible context ever lies there.

Drawing happens where `loss_mask` lies, meant to be the host; the rest runs on the device and never waits for it.

Shapes: B samples, S tokens, N anchors, K block size, Q = N*K block positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.drafter_config import DrafterConfig


class NoValidAnchorsError(ValueError):
    """No sample of a batch has two supervised tokens in a row, so there is nothing to train on."""


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """Positions drawn for one batch; ascending in each sample, padding last."""

    positions: Tensor
    """[B, N] int64, 0 in padded slots."""
    keep: Tensor
    """[B, N] bool, False in padded slots."""
    num_valid: int
    """How many positions of the batch could have been drawn."""
    num_used: int
    """How many were."""


@dataclass(frozen=True, kw_only=True)
class BlockBatch:
    """Everything the drafter and its loss need to know about one batch of blocks."""

    noise_ids: Tensor
    """[B, Q] token ids to look up in the target's embedding."""
    position_ids: Tensor
    """[B, S+Q] positions of the context, then of the blocks."""
    masks: dict[str, Tensor]
    """Layer type -> [B, 1, Q, S+Q] bool, True where a key is visible."""
    labels: Tensor
    """[B, N, K] the token at each slot's own position; slot 0 is the anchor."""
    weights: Tensor
    """[B, N, K] float32 loss weights, 0 where nothing is to be learned."""
    num_valid_anchors: int
    num_used_anchors: int


def sample_anchors(loss_mask: Tensor, num_anchors: int, generator: torch.Generator) -> Anchors:
    """Draw up to `num_anchors` anchors in each row of `loss_mask` [B, S], evenly and without replacement.

    `generator` must live on the device of `loss_mask`. Raises NoValidAnchorsError when no row has one.
    """
    supervised = loss_mask.bool()
    valid = supervised[:, :-1] & supervised[:, 1:]
    num_valid = int(valid.sum())
    if num_valid == 0:
        raise NoValidAnchorsError(
            f"none of the {loss_mask.shape[0]} samples in this batch has two supervised tokens in a row; "
            "drop such samples or check how the loss mask is made"
        )
    scores = torch.rand(valid.shape, generator=generator, device=valid.device).masked_fill(~valid, 2.0)
    drawn = scores.argsort(dim=1)[:, :num_anchors]
    beyond = loss_mask.shape[1]
    positions = torch.full((valid.shape[0], num_anchors), beyond, device=valid.device)
    positions[:, : drawn.shape[1]] = drawn.masked_fill(~valid.gather(1, drawn), beyond)
    positions = positions.sort(dim=1).values
    keep = positions < beyond
    return Anchors(positions=positions.masked_fill(~keep, 0), keep=keep, num_valid=num_valid, num_used=int(keep.sum()))


def build_blocks(
    input_ids: Tensor, loss_mask: Tensor, anchors: Anchors, config: DrafterConfig, decay_gamma: float
) -> BlockBatch:
    """Build the blocks of `anchors` on the device of `input_ids` [B, S].

    `loss_mask` [B, S] is 1 on supervised tokens, 0 elsewhere and on padding. Slot k weighs exp(-(k-1) / decay_gamma).
    """
    device = input_ids.device
    positions = anchors.positions.to(device, non_blocking=True)
    keep = anchors.keep.to(device, non_blocking=True)
    loss_mask = loss_mask.to(device, non_blocking=True)
    num_samples, num_tokens = input_ids.shape
    offsets = torch.arange(config.block_size, device=device)
    slots = positions[..., None] + offsets

    noise_ids = torch.full_like(slots, config.mask_token_id)
    noise_ids[..., 0] = input_ids.gather(1, positions).masked_fill(~keep, config.mask_token_id)

    inside = slots.clamp(max=num_tokens - 1).flatten(1)
    labels = input_ids.gather(1, inside).view_as(slots)
    learned = loss_mask.bool().gather(1, inside).view_as(slots) & (slots < num_tokens) & (offsets > 0)
    decay = torch.exp(-(offsets - 1).float() / decay_gamma)

    context_positions = torch.arange(num_tokens, device=device).expand(num_samples, -1)
    return BlockBatch(
        noise_ids=noise_ids.flatten(1),
        position_ids=torch.cat([context_positions, slots.flatten(1)], dim=1),
        masks=block_masks(positions, keep, num_tokens, config),
        labels=labels,
        weights=(learned & keep[..., None]) * decay,
        num_valid_anchors=anchors.num_valid,
        num_used_anchors=anchors.num_used,
    )


def block_masks(positions: Tensor, keep: Tensor, num_context: int, config: DrafterConfig) -> dict[str, Tensor]:
    """Say which of [context | block] keys each block position sees, for every layer type of `config`.

    `positions` and `keep` are [B, N]; context keys sit at positions 0..num_context-1. A block sees the context strictly
    before its anchor, and itself; never another block. Returns [B, 1, Q, num_context+Q] booleans.
    """
    block_size, device = config.block_size, positions.device
    num_queries = positions.shape[1] * block_size
    index = torch.arange(num_queries, device=device)
    block, offset = index // block_size, index % block_size
    anchor = positions.repeat_interleave(block_size, dim=1)[:, None, :, None]
    kept = keep.repeat_interleave(block_size, dim=1)[:, None, :, None]
    context = torch.arange(num_context, device=device)
    same_block = block[:, None] == block[None, :]
    distance = offset[:, None] - offset[None, :]

    masks: dict[str, Tensor] = {}
    for layer_type in sorted(set(config.layer_types)):
        sliding = layer_type == "sliding_attention"
        causal = sliding if config.is_causal is None else config.is_causal
        in_context = (context < anchor) & kept
        in_block = same_block & (distance >= 0) if causal else same_block
        if sliding:
            assert config.sliding_window is not None
            in_context = in_context & (anchor + offset[:, None] - context < config.sliding_window)
            in_block = in_block & (distance.abs() < config.sliding_window)
        in_block = in_block.expand(positions.shape[0], 1, -1, -1)
        masks[layer_type] = torch.cat([in_context, in_block], dim=-1)
    return masks
