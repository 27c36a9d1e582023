"""Turn a batch of token sequences into drafting blocks to train on.

An anchor is a known token; its block asks the drafter for the `block_size - 1` tokens that follow. Anchors are drawn
afresh at every step, from positions where both the anchor and its successor are supervised. Each sample always
gets exactly `num_anchors` slots, so shapes never change from step to step; slots that could not be filled are padded
blocks with `keep` False, weight 0, and a view of nothing but themselves (a query without a single visible key
would turn into NaN and poison its sample).

A block that runs past the end of its text is kept and only its missing labels are dropped: that is what trains the
tokens near the end. Padding needs no lengths: it is what `loss_mask` marks 0, and no anchor, label or
visible context ever lies there.

Drawing happens where `loss_mask` lies, meant to be the host, and so does `lay_out`, which finds out what the device
would otherwise have to be asked: which slots are worth the head, and how much context each block can see. The rest runs
on the device and never waits for it.

Shapes: B samples, S tokens, N anchors, K block size, Q = N*K block positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.attention import GROUP_POSITIONS, GroupedView, Span, View
from trainer.drafter_config import DrafterConfig
from trainer.flex_masks import flex_mask

AttentionName = Literal["masked", "groups", "flex"]


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
class Layout:
    """What the host knows of drawn anchors."""

    learned_slots: Tensor
    """[R] places in the flattened [B, N, K] of all slots whose weight is not 0, ascending."""
    attention: AttentionName
    spans: Mapping[str, tuple[Span, ...]]
    """Layer type -> groups of blocks and the context that they see; empty but for attention in groups."""


@dataclass(frozen=True, kw_only=True)
class BlockBatch:
    """Everything the drafter and its loss need to know about one batch of blocks."""

    noise_ids: Tensor
    """[B, Q] token ids to look up in the target's embedding."""
    position_ids: Tensor
    """[B, S+Q] positions of the context, then of the blocks."""
    masks: dict[str, View]
    """Layer type -> [B, 1, Q, S+Q] bool, True where a key is visible, or the same in groups."""
    labels: Tensor
    """[B, N, K] the token at each slot's own position; slot 0 is the anchor."""
    weights: Tensor
    """[B, N, K] float32 loss weights, 0 where nothing is to be learned."""
    num_valid_anchors: int
    num_used_anchors: int
    learned_slots: Tensor | None = None
    """[R] as in Layout, on the device; None when nobody laid the anchors out."""


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


def lay_out(loss_mask: Tensor, anchors: Anchors, config: DrafterConfig, attention: AttentionName = "groups") -> Layout:
    """Find out on the host what the anchors drawn from `loss_mask` [B, S] need; both lie there.

    `attention` says how blocks are to be attended: masked for any device, groups for a CPU, flex for a GPU.
    """
    learned = _is_learned(loss_mask, anchors.positions, anchors.keep, config.block_size)
    layer_types = set(config.layer_types) if attention == "groups" else ()
    spans: dict[str, tuple[Span, ...]] = {name: _spans(anchors, name, config) for name in layer_types}
    return Layout(learned_slots=learned.flatten().nonzero()[:, 0], attention=attention, spans=spans)


def build_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Anchors,
    config: DrafterConfig,
    decay_gamma: float,
    layout: Layout | None = None,
) -> BlockBatch:
    """Build the blocks of `anchors` on the device of `input_ids` [B, S].

    `loss_mask` [B, S] is 1 on supervised tokens, 0 elsewhere and on padding. Slot k weighs exp(-(k-1) / decay_gamma).
    A `layout` of the same anchors saves work and changes nothing.
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

    labels = input_ids.gather(1, slots.clamp(max=num_tokens - 1).flatten(1)).view_as(slots)
    learned = _is_learned(loss_mask, positions, keep, config.block_size)
    decay = torch.exp(-(offsets - 1).float() / decay_gamma)

    context_positions = torch.arange(num_tokens, device=device).expand(num_samples, -1)
    return BlockBatch(
        noise_ids=noise_ids.flatten(1),
        position_ids=torch.cat([context_positions, slots.flatten(1)], dim=1),
        masks=_views(positions, keep, num_tokens, config, layout),
        labels=labels,
        weights=learned * decay,
        num_valid_anchors=anchors.num_valid,
        num_used_anchors=anchors.num_used,
        learned_slots=None if layout is None else layout.learned_slots.to(device, non_blocking=True),
    )


def _views(
    positions: Tensor, keep: Tensor, num_context: int, config: DrafterConfig, layout: Layout | None
) -> dict[str, View]:
    if layout is not None and layout.attention == "flex":
        names = set(config.layer_types)
        return {name: flex_mask(positions, keep, num_context, name, config) for name in names}
    masks = block_masks(positions, keep, num_context, config)
    if layout is not None and layout.attention == "groups":
        return {name: GroupedView.of(mask, layout.spans[name], num_context) for name, mask in masks.items()}
    return {**masks}


def _is_learned(loss_mask: Tensor, positions: Tensor, keep: Tensor, block_size: int) -> Tensor:
    """[B, N, K] bool: supervised slots of kept blocks that lie within the text, but for the anchors' own."""
    offsets = torch.arange(block_size, device=positions.device)
    slots = positions[..., None] + offsets
    num_tokens = loss_mask.shape[1]
    supervised = loss_mask.bool().gather(1, slots.clamp(max=num_tokens - 1).flatten(1)).view_as(slots)
    return supervised & (slots < num_tokens) & (offsets > 0) & keep[..., None]


def _spans(anchors: Anchors, layer_type: str, config: DrafterConfig) -> tuple[Span, ...]:
    """Groups of some consecutive blocks, and from where to where any sample's blocks of a group see context."""
    size = config.block_size
    num_blocks, per_group = anchors.positions.shape[1], max(1, GROUP_POSITIONS // size)
    beyond = int(anchors.positions.max())
    first_anchors = anchors.positions.masked_fill(~anchors.keep, beyond).amin(dim=0).tolist()
    last_anchors = anchors.positions.amax(dim=0).tolist()
    spans = []
    for start in range(0, num_blocks, per_group):
        blocks = slice(start, min(start + per_group, num_blocks))
        last = max(last_anchors[blocks])
        first = 0
        if layer_type == "sliding_attention":
            assert config.sliding_window is not None
            first = min(max(0, min(first_anchors[blocks]) - config.sliding_window + 1), last)
        spans.append(
            Span(first_query=blocks.start * size, last_query=blocks.stop * size, first_context=first, last_context=last)
        )
    return tuple(spans)


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
