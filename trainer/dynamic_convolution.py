"""The convolution of a DFlash 2 drafter: each slot of a block sees the slots just before it.

Attention and feed-forward are each wrapped in two short causal convolutions, one over what goes in and one over what
comes out. A kernel is a learned base plus a part computed from the input, one number for each group of channels, so
it changes from slot to slot. Nothing flows across the edge of a block: its first slot sees only itself.

Shapes: B samples, Q block positions, K block size, W kernel size, G groups of channels, H hidden size.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

SIDES = 2  # One convolution over the input of the wrapped part, one over its output.


class DynamicConvolution(nn.Module):
    """The two convolutions around one part of a layer; it starts as the identity.

    Args:
        hidden_size: Channels H.
        kernel_size: Slots W that a kernel spans, its own included.
        group_size: Channels that share the computed part of their kernels.
        block_size: Slots K of a block.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int, block_size: int) -> None:
        super().__init__()
        self.kernel_size, self.group_size, self.block_size = kernel_size, group_size, block_size
        num_kernels = SIDES * kernel_size * (hidden_size // group_size)
        self.base_kernel = nn.Parameter(torch.zeros(SIDES, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, num_kernels, bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Make it the identity again: every kernel is 1 at its own slot and 0 elsewhere."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def around(self, part: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Apply `part` to `hidden` [B, Q, H] between the two convolutions."""
        kernels = self.kernel_projection(hidden).view(*hidden.shape[:-1], SIDES, -1)
        mixed = part(self._convolve(hidden, kernels[..., 0, :], side=0))
        return self._convolve(mixed, kernels[..., 1, :], side=1)

    def _convolve(self, hidden: Tensor, dynamic: Tensor, side: int) -> Tensor:
        num_samples, num_positions, hidden_size = hidden.shape
        # While training there are many whole blocks side by side; while drafting, one, which may be cut short.
        length = min(self.block_size, num_positions)
        slots = hidden.view(num_samples, -1, length, hidden_size // self.group_size, self.group_size)
        computed = dynamic.reshape(num_samples, slots.shape[1], length, self.kernel_size, -1, 1)
        base = self.base_kernel[side].to(hidden.dtype).view(self.kernel_size, -1, self.group_size)
        out = slots * (base[0] + computed[:, :, :, 0])
        for offset in range(1, min(self.kernel_size, length)):
            earlier = nn.functional.pad(slots[:, :, :-offset], (0, 0, 0, 0, offset, 0))
            out = out + earlier * (base[offset] + computed[:, :, :, offset])
        return out.view_as(hidden)


def around(convolution: DynamicConvolution | None, part: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Apply `part` to `hidden`, between the two convolutions where there are any."""
    return part(hidden) if convolution is None else convolution.around(part, hidden)
