"""Attention of drafted blocks over [context | own block], without paying for what a block cannot see.

A block sees the context before its anchor and itself. One masked attention over everything computes all other scores
too, most of them for nothing. On a CPU, blocks are therefore attended a few at a time: anchors ascend, so a group of
consecutive blocks needs the context only up to its last anchor, and of the block positions only its own. On a GPU flex
attention can skip what nobody sees, tile by tile.

Shapes: B samples, Q block positions, S context positions, A attention heads, G key/value heads, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by
from torch.nn.attention.flex_attention import BlockMask, flex_attention

GROUP_POSITIONS = 48
"""Block positions attended at a time: fewer make products too small for a CPU, more compute scores for nothing."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Consecutive blocks, and the context that none of them sees beyond; half-open ranges of positions."""

    first_query: int
    last_query: int
    first_context: int
    last_context: int


@dataclass(frozen=True)
class GroupedView:
    """What each block position sees, group by group: spans, and [B or 1, 1, queries, keys] booleans for each."""

    groups: tuple[tuple[Span, Tensor], ...]

    @classmethod
    def of(cls, mask: Tensor, spans: tuple[Span, ...], num_context: int) -> "GroupedView":
        """Cut a whole mask [B or 1, 1, Q, num_context+Q] into the parts that hold all its True."""
        groups = []
        for span in spans:
            rows = mask[:, :, span.first_query : span.last_query]
            own = rows[..., num_context + span.first_query : num_context + span.last_query]
            groups.append((span, torch.cat([rows[..., span.first_context : span.last_context], own], dim=-1)))
        return cls(tuple(groups))


View = Tensor | GroupedView | BlockMask
"""[B or 1, 1, Q, S+Q] booleans, True where a key is visible, or the same in groups, or for flex attention."""
KeysValues = tuple[Tensor, Tensor]


def _uncompiled_flex_attention() -> Callable[..., Any]:
    return flex_attention


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Uncompiled it would hold all scores; texts differ in length, so one compilation has to serve them all."""
    return torch.compile(flex_attention, dynamic=True)


def attend(queries: Tensor, context: KeysValues, block: KeysValues, view: View) -> Tensor:
    """Attend from `queries` [B, A, Q, D] over keys and values of context [B, G, S, D] and blocks [B, G, Q, D]."""
    if isinstance(view, BlockMask):
        keys, values = _joined(context[0], block[0]), _joined(context[1], block[1])
        flex = _compiled_flex_attention if queries.is_cuda else _uncompiled_flex_attention
        mixed: Tensor = flex()(queries, keys, values, block_mask=view, enable_gqa=True)
        return mixed
    if isinstance(view, Tensor):
        return _attend_at_once(queries, _joined(context[0], block[0]), _joined(context[1], block[1]), view)
    outputs = []
    for span, mask in view.groups:
        seen, own = slice(span.first_context, span.last_context), slice(span.first_query, span.last_query)
        keys, values = (
            _joined(of_context[:, :, seen], of_block[:, :, own])
            for of_context, of_block in zip(context, block, strict=True)
        )
        outputs.append(_attend_group(queries[:, :, own], keys, values, mask))
    return torch.cat(outputs, dim=2)


def _joined(context: Tensor, block: Tensor) -> Tensor:
    return torch.cat([context, block], dim=2)


def _attend_at_once(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    # Key/value heads are copied out: on CUDA, masked SDPA with grouped heads would store all scores.
    copies = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(copies, dim=1) for each in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def _attend_group(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The same by plain matrix products: on a CPU the backward pass of fused attention takes twice as long.

    Query heads that share a key/value head are laid end to end, so that nothing is copied and products are larger.
    """
    num_key_value_heads, (num_samples, num_heads, num_queries, head_dim) = keys.shape[1], queries.shape
    stacked = queries.reshape(num_samples, num_key_value_heads, -1, head_dim)
    scores = (stacked @ keys.transpose(2, 3)).float() * head_dim**-0.5
    scores = scores.view(num_samples, num_heads, num_queries, -1).masked_fill(~mask, -torch.inf)
    shares = scores.softmax(dim=-1).to(values.dtype).view(num_samples, num_key_value_heads, stacked.shape[2], -1)
    mixed: Tensor = shares @ values
    return mixed.view(num_samples, num_heads, num_queries, head_dim)
