"""Triton kernels; each has a torch twin that CPUs use and tests compare it with."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainer.tiled_head import HeadScale, RunningSoftmax


@triton.jit  # type: ignore[untyped-decorator]  # Triton publishes no types
def _fold_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917 - plain pointers and numbers
    products,
    row_stride,
    labels,
    maximum,
    normalizer,
    rescale,
    prediction,
    label_logit,
    first_token,
    num_tokens,
    multiplier,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program folds one row of a tile; the twin is `trainer.tiled_head.fold_logits`."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < num_tokens
    places = products + row.to(tl.int64) * row_stride + columns
    logits = tl.load(places, mask=is_inside, other=0.0).to(tl.float32) * multiplier
    slope = 1.0
    if HAS_SOFTCAP:
        # tanh(x) by the sigmoid: Triton's own tanh is not the same function on every backend.
        squashed = 2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0
        logits = squashed * softcap
        slope = 1.0 - squashed * squashed
    logits = tl.where(is_inside, logits, -float("inf"))
    top = tl.max(logits, axis=0)
    top_place = tl.argmax(logits, axis=0, tie_break_left=True)
    old_maximum = tl.load(maximum + row)
    new_maximum = tl.maximum(old_maximum, top)
    factor = tl.exp(old_maximum - new_maximum)
    weights = tl.exp(logits - new_maximum)
    tl.store(normalizer + row, tl.load(normalizer + row) * factor + tl.sum(weights, axis=0))
    tl.store(maximum + row, new_maximum)
    tl.store(rescale + row, factor)
    if top > old_maximum:
        tl.store(prediction + row, first_token + top_place.to(tl.int64))
    label_column = tl.load(labels + row) - first_token
    if (label_column >= 0) & (label_column < num_tokens):
        tl.store(label_logit + row, tl.sum(tl.where(columns == label_column, logits, 0.0), axis=0))
    tl.store(places, (weights * slope).to(products.dtype.element_ty), mask=is_inside)


def fold_logits(products: "Tensor", first_token: int, running: "RunningSoftmax", scale: "HeadScale") -> None:
    """Do what the function of the same name in `trainer.tiled_head` does, in one pass over the products."""
    num_rows, num_tokens = products.shape
    block = triton.next_power_of_2(num_tokens)
    _fold_kernel[(num_rows,)](
        products,
        products.stride(0),
        running.labels,
        running.maximum,
        running.normalizer,
        running.rescale,
        running.prediction,
        running.label_logit,
        first_token,
        num_tokens,
        scale.multiplier,
        1.0 if scale.softcap is None else scale.softcap,
        HAS_SOFTCAP=scale.softcap is not None,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,  # noqa: PLR2004 - at most 32 values a thread
    )


@triton.jit  # type: ignore[untyped-decorator]  # Triton publishes no types
def _pack_kernel(  # type: ignore[no-untyped-def]
    layers,
    positions,
    packed,
    layer_width,
    NUM_LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program moves a block of columns of one real token, of every layer; the twin is `trainer.packing`."""
    # 64 bits: a long batch of a wide target has more than 2**31 values.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < layer_width
    source = tl.load(positions + row) * layer_width + columns
    target = packed + row * NUM_LAYERS * layer_width + columns
    for number in tl.static_range(NUM_LAYERS):
        values = tl.load(layers[number] + source, mask=is_inside)
        tl.store(target + number * layer_width, values.to(packed.dtype.element_ty), mask=is_inside)


def pack_layers(layers: "Sequence[Tensor]", positions: "Tensor", packed: "Tensor") -> None:
    """Do what the function of the same name in `trainer.packing` does, in one launch for all layers."""
    assert packed.is_contiguous()
    if not len(positions):
        # CUDA refuses a grid of nothing.
        return
    layer_width = layers[0].shape[-1]
    block = min(triton.next_power_of_2(layer_width), 1024)
    _pack_kernel[(len(positions), triton.cdiv(layer_width, block))](
        tuple(layer.contiguous() for layer in layers),
        positions,
        packed,
        layer_width,
        NUM_LAYERS=len(layers),
        BLOCK=block,
    )
