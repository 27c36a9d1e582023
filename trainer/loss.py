"""Cross entropy of drafted blocks through the target's frozen output head, without ever holding all logits.

At a vocabulary of 248,320 and 512 blocks of 16, the logits of one sample are 4 GB. So the head and the cross entropy
run over some rows at a time, and because the head is frozen the gradient with respect to the rows,
weight * (softmax - onehot) @ head, is formed right there and is all that is kept for the backward pass.

The result is a sum, not a mean: the caller adds up denominators over micro-batches and workers and calls
`(numerator / total_denominator).backward()`. Everything stays on the device. Slot 0 is sliced away; rows of
weight 0 stay, because picking them out would make the host wait for the device.

Shapes: B samples, N blocks, K block size, Q = N*K, R = B*N*(K-1) drafted rows, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by

from trainer.drafter_config import DrafterConfig

DEFAULT_CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class DrafterLoss:
    """Sums over one batch; scalars and [K-1] vectors in float32 on the device of the hidden states."""

    numerator: Tensor
    """Sum of weight * cross entropy; the only field with a gradient."""
    denominator: Tensor
    """Sum of weights."""
    num_correct: Tensor
    """[K-1] supervised slots 1..K-1 whose most likely token is the label."""
    num_predicted: Tensor
    """[K-1] supervised slots 1..K-1."""
    accept_length_sum: Tensor
    """Tokens a verifier holding the labels would gain, 1 + leading correct slots, summed over complete blocks."""
    num_complete_blocks: Tensor
    """Blocks supervised in every slot 1..K-1."""


class HeadScale(NamedTuple):
    """What happens to logits between the head and the softmax."""

    multiplier: float
    softcap: float | None


def drafter_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    config: DrafterConfig,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> DrafterLoss:
    """Compute loss sums and acceptance counts of drafted blocks.

    Args:
        hidden: [B, Q, H] drafter output.
        head_weight: [V, H] frozen head of the target. Logits are computed in autocast's dtype if it is on, else in the
            head's own; the softmax is fp32.
        labels: [B, N, K] as in BlockBatch.
        weights: [B, N, K] as in BlockBatch.
        config: gives output_multiplier and final_logit_softcapping.
        chunk_bytes: bound on the fp32 logits held at a time.
    """
    num_drafted = config.block_size - 1
    rows = hidden.view(*labels.shape, -1)[:, :, 1:].flatten(0, 2)
    drafted_labels, drafted_weights = labels[:, :, 1:].flatten(), weights[:, :, 1:].flatten()
    scale = HeadScale(config.output_multiplier, config.final_logit_softcapping)
    chunk_rows = max(1, chunk_bytes // (4 * head_weight.shape[0]))
    numerator, predictions = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        rows, head_weight, drafted_labels, drafted_weights, scale, chunk_rows
    )
    supervised = (drafted_weights > 0).view(-1, num_drafted)
    correct = (predictions == drafted_labels).view(-1, num_drafted) & supervised
    complete = supervised.all(dim=1)
    accept_lengths = 1 + correct.cumprod(dim=1).sum(dim=1)
    return DrafterLoss(
        numerator=numerator,
        denominator=drafted_weights.sum(),
        num_correct=correct.sum(dim=0).float(),
        num_predicted=supervised.sum(dim=0).float(),
        accept_length_sum=(accept_lengths * complete).sum().float(),
        num_complete_blocks=complete.sum().float(),
    )


def head_logits(hidden: Tensor, head_weight: Tensor, scale: HeadScale) -> Tensor:
    """Map `hidden` [..., H] to fp32 logits [..., V], computing the product in the dtype of `head_weight`."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.to(head_weight.dtype), head_weight).float()
    if scale.multiplier != 1.0:
        logits = logits * scale.multiplier
    if scale.softcap is not None:
        logits = torch.tanh(logits / scale.softcap) * scale.softcap
    return logits


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted cross entropy whose forward already forms the gradient of its rows."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd passes inputs one by one
        ctx: Any,  # noqa: ANN401 - torch types it so
        rows: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        scale: HeadScale,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        device_type = rows.device.type
        if torch.is_autocast_enabled(device_type):
            head_weight = head_weight.to(torch.get_autocast_dtype(device_type))
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        loss = torch.zeros((), device=rows.device)
        predictions = torch.empty_like(labels)
        for start in range(0, rows.shape[0], chunk_rows):
            part = slice(start, start + chunk_rows)
            logits = head_logits(rows[part], head_weight, scale)
            top, predictions[part] = logits.max(dim=1)
            picked = labels[part, None]
            label_logits = logits.gather(1, picked)[:, 0]
            slope = None if scale.softcap is None else 1 - (logits / scale.softcap).square()
            probabilities = logits.sub_(top[:, None]).exp_()
            normalizer = probabilities.sum(dim=1)
            loss += ((normalizer.log() + top - label_logits) * weights[part]).sum()
            if grad_rows is not None:
                grad_logits = probabilities.mul_((scale.multiplier * weights[part] / normalizer)[:, None])
                grad_logits.scatter_add_(1, picked, -scale.multiplier * weights[part, None])
                if slope is not None:
                    grad_logits.mul_(slope)
                with torch.autocast(device_type, enabled=False):
                    grad_rows[part] = (grad_logits.to(head_weight.dtype) @ head_weight).to(rows.dtype)
        ctx.save_for_backward(grad_rows)
        ctx.mark_non_differentiable(predictions)
        return loss, predictions

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_predictions: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch types it so
        (grad_rows,) = ctx.saved_tensors
        return grad_rows * grad_loss, None, None, None, None, None
