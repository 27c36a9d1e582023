"""Samples whose hidden states are not finite are left out of a step, on the device, without asking it for a value."""

from typing import NamedTuple

import torch
from torch import Tensor


class Kept(NamedTuple):
    """A batch in which broken samples count for nothing."""

    hidden: Tensor
    """[B, S, F] with zeros in the place of broken samples: 0 times NaN would be NaN."""
    weights: Tensor
    """[B, N, K] loss weights, 0 for broken samples."""
    num_skipped: Tensor
    """Broken samples, a float32 scalar."""


def leave_out_nonfinite(hidden: Tensor, weights: Tensor) -> Kept:
    """Take the samples out of a batch that have an infinite or undefined hidden state.

    Args:
        hidden: [B, S, F] hidden states, in the dtype that they are computed with.
        weights: [B, N, K] loss weights.
    """
    finite = torch.isfinite(hidden).flatten(1).all(dim=1)[:, None, None]
    return Kept(
        hidden=torch.where(finite, hidden, 0.0),
        weights=weights * finite,
        num_skipped=(~finite).sum().float(),
    )
