"""What drafted blocks see, as flex attention wants it: a rule per pair, and which tiles of pairs have anything to see.

The rule is that of `trainer.anchors.block_masks`; nothing as large as all pairs is ever made on a GPU.
"""

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from trainer.drafter_config import DrafterConfig


def flex_mask(positions: Tensor, keep: Tensor, num_context: int, layer_type: str, config: DrafterConfig) -> BlockMask:
    """Build the mask of one layer type; `positions` and `keep` are [B, N], keys are [context | blocks]."""
    num_samples, num_blocks = positions.shape
    size, num_queries = config.block_size, num_blocks * config.block_size
    slides = layer_type == "sliding_attention"
    is_causal = slides if config.is_causal is None else config.is_causal
    window = config.sliding_window if slides else None

    def is_visible(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Tiles reach beyond the last query, where no block is.
        block = (query // size).clamp(max=num_blocks - 1)
        offset, own = query % size, key - num_context
        anchor, distance = positions[sample, block], offset - own % size
        in_context = (key < num_context) & (key < anchor) & keep[sample, block]
        in_block = (own >= 0) & (own // size == block)
        if is_causal:
            in_block &= distance >= 0
        if window is not None:
            in_context &= anchor + offset - key < window
            in_block &= distance.abs() < window
        return in_context | in_block

    return create_block_mask(
        is_visible,
        B=num_samples,
        H=None,
        Q_LEN=num_queries,
        KV_LEN=num_context + num_queries,
        device=positions.device,
        # Otherwise it would first hold the rule's answer for every pair.
        _compile=positions.is_cuda,
    )
