"""The tapped layers of one batch, packed: real tokens only, layers side by side, in the dtype that travels.

Tensor suffixes: P packed positions (no padding), F tapped layers x hidden size.
"""
# ruff: noqa: N803 - tensor names carry their shape

from collections.abc import Sequence

import torch
from torch import Tensor


def pack_layers(layers: Sequence[Tensor], positions_P: Tensor, packed_PF: Tensor) -> None:
    """Write the layers' rows at `positions_P`, side by side, into `packed_PF`, and cast them to its dtype.

    On a GPU a Triton kernel does it in one pass (trainer/kernels.py), with no copy of the padded layers in between.

    Args:
        layers: Outputs of the tapped layers, each [B, S, H].
        positions_P: Places of the real tokens in the flattened batch, on the layers' device.
        packed_PF: Where they go, contiguous.
    """
    if packed_PF.is_cuda:
        # Triton comes with torch's CUDA builds only.
        from trainer.kernels import pack_layers as pack_on_gpu  # noqa: PLC0415

        pack_on_gpu(layers, positions_P, packed_PF)
        return
    for layer, columns in zip(layers, packed_PF.chunk(len(layers), dim=1), strict=True):
        columns.copy_(torch.index_select(layer.flatten(0, 1), 0, positions_P))
