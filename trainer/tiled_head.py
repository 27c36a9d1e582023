"""Cross entropy through a frozen output head, one tile of rows and tokens at a time.

The gradient of a row's cross entropy with respect to the row is softmax(row @ head.T) @ head - head[label]. Its first
part is attention with one head whose keys and values are both the output head, so it can be computed like flash
attention: over the vocabulary in tiles, with a running maximum and normalizer per row, and the sum so far scaled down
whenever the maximum grows. Each logit is computed once and forgotten once its tile has been folded in; at a vocabulary
of 248,320 and 512 blocks of 16 all logits of one sample would be 4 GB. And a tile is small enough to stay in a CPU's
cache between the two matrix products, which is worth as much as the memory.

Because the head is frozen, the gradient of the rows is formed in the forward pass and is all that is kept.

Shapes: R rows, H hidden size, V vocabulary, T tokens of a tile.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by


class HeadScale(NamedTuple):
    """What happens to logits between the head and the softmax."""

    multiplier: float
    softcap: float | None


class Tile(NamedTuple):
    """How many logits are held at a time."""

    num_rows: int
    num_tokens: int


# On a CPU 8 MiB of float32, which stay in its cache; on a GPU few launches, and no more than 256 MiB.
DEFAULT_TILES = {"cpu": Tile(1024, 2048), "cuda": Tile(8192, 8192)}


@dataclass(frozen=True, kw_only=True)
class RunningSoftmax:
    """What is known of each row after some tiles; [R] each, float32 but for the two ids."""

    labels: Tensor
    maximum: Tensor
    """Largest logit so far."""
    normalizer: Tensor
    """Sum of exp(logit - maximum) so far."""
    rescale: Tensor
    """What the last tile made of earlier sums: exp(maximum before it - maximum after it)."""
    prediction: Tensor
    """The first token whose logit is the largest so far."""
    label_logit: Tensor
    """The label's logit, once its tile has been seen."""

    @classmethod
    def start(cls, labels: Tensor) -> "RunningSoftmax":
        """Before the first tile."""
        nothing = torch.zeros(labels.shape, device=labels.device)
        return cls(
            labels=labels,
            maximum=torch.full_like(nothing, -torch.inf),
            normalizer=nothing,
            rescale=torch.zeros_like(nothing),
            prediction=torch.zeros_like(labels),
            label_logit=torch.zeros_like(nothing),
        )

    def cross_entropy(self) -> Tensor:
        """After the last tile."""
        return self.normalizer.log() + self.maximum - self.label_logit


def head_logits(hidden: Tensor, head_weight: Tensor, scale: HeadScale) -> Tensor:
    """Map `hidden` [..., H] to fp32 logits [..., V], computing the product in the dtype of `head_weight`."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.to(head_weight.dtype), head_weight).float()
    return _scaled(logits, scale)


def cross_entropy(
    rows: Tensor, head_weight: Tensor, labels: Tensor, scale: HeadScale, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of `rows` [R, H] with `labels` [R], float32 [R], and the likeliest tokens [R].

    Only the cross entropy has a gradient, and only with respect to the rows. Logits are computed in autocast's dtype if
    it is on, else in that of `head_weight` [V, H]; the softmax is float32.
    """
    tile = tile or DEFAULT_TILES[rows.device.type]
    losses, predictions = _TiledCrossEntropy.apply(rows, head_weight, labels, scale, tile)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return losses, predictions


def fold_logits(products: Tensor, first_token: int, running: RunningSoftmax, scale: HeadScale) -> None:
    """Fold the products [R, T] of rows and a tile of the head into `running`.

    In the products' place it leaves exp(logit - maximum), times what the soft cap's slope makes of it: what the tile
    of the head is to be weighed with. On a GPU a Triton kernel does the same in one pass (trainer/kernels.py).
    """
    if products.is_cuda:
        # Triton comes with torch's CUDA builds only.
        from trainer.kernels import fold_logits as fold_on_gpu  # noqa: PLC0415

        fold_on_gpu(products, first_token, running, scale)
        return
    logits = _scaled(products.float(), scale)
    top, place = logits.max(dim=1)
    running.prediction.copy_(torch.where(top > running.maximum, place + first_token, running.prediction))
    maximum = torch.maximum(running.maximum, top)
    torch.exp(running.maximum - maximum, out=running.rescale)
    running.maximum.copy_(maximum)
    column = running.labels - first_token
    is_here = (column >= 0) & (column < logits.shape[1])
    label_logit = logits.gather(1, column.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    running.label_logit.copy_(torch.where(is_here, label_logit, running.label_logit))
    slope = None if scale.softcap is None else 1 - (logits / scale.softcap).square()
    weights = logits.sub_(maximum[:, None]).exp_()
    running.normalizer.mul_(running.rescale).add_(weights.sum(dim=1))
    products.copy_(weights if slope is None else weights.mul_(slope))


def _scaled(logits: Tensor, scale: HeadScale) -> Tensor:
    if scale.multiplier != 1.0:
        logits = logits * scale.multiplier
    if scale.softcap is not None:
        logits = torch.tanh(logits / scale.softcap) * scale.softcap
    return logits


class _TiledCrossEntropy(torch.autograd.Function):
    """Cross entropy whose forward already forms the gradient of its rows."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch types it so
        rows: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        scale: HeadScale,
        tile: Tile,
    ) -> tuple[Tensor, Tensor]:
        device_type = rows.device.type
        if torch.is_autocast_enabled(device_type):
            head_weight = head_weight.to(torch.get_autocast_dtype(device_type))
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        losses = torch.empty(rows.shape[0], device=rows.device)
        predictions = torch.empty_like(labels)
        with torch.autocast(device_type, enabled=False):
            for start in range(0, rows.shape[0], tile.num_rows):
                part = slice(start, start + tile.num_rows)
                running, mixed = _stream(
                    rows[part].to(head_weight.dtype),
                    head_weight,
                    labels[part],
                    scale,
                    tile.num_tokens,
                    mixes=grad_rows is not None,
                )
                losses[part], predictions[part] = running.cross_entropy(), running.prediction
                if grad_rows is not None and mixed is not None:
                    grad_rows[part] = _gradient(running, mixed, head_weight, scale)
        ctx.save_for_backward(grad_rows)
        ctx.mark_non_differentiable(predictions)
        return losses, predictions

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor, _grad_predictions: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch types it so
        (grad_rows,) = ctx.saved_tensors
        return (grad_rows * grad_losses[:, None]).to(grad_rows.dtype), None, None, None, None


def _stream(
    rows: Tensor, head_weight: Tensor, labels: Tensor, scale: HeadScale, num_tile_tokens: int, *, mixes: bool
) -> tuple[RunningSoftmax, Tensor | None]:
    """Take `rows` through all of the head; if it `mixes`, also return exp(logits - maximum) @ head, float32 [R, H]."""
    running = RunningSoftmax.start(labels)
    mixed = torch.zeros(rows.shape, device=rows.device) if mixes else None
    for first_token in range(0, head_weight.shape[0], num_tile_tokens):
        part = head_weight[first_token : first_token + num_tile_tokens]
        products = rows @ part.T
        fold_logits(products, first_token, running, scale)
        if mixed is not None:
            mixed.mul_(running.rescale[:, None]).add_(products @ part)
    return running, mixed


def _gradient(running: RunningSoftmax, mixed: Tensor, head_weight: Tensor, scale: HeadScale) -> Tensor:
    """Gradient of the cross entropy with respect to its rows, float32 [R, H]."""
    label_slope = torch.full_like(running.label_logit, scale.multiplier)
    if scale.softcap is not None:
        label_slope *= 1 - (running.label_logit / scale.softcap).square()
    expected = mixed.mul_((scale.multiplier / running.normalizer)[:, None])
    return expected.sub_(head_weight[running.labels].float().mul_(label_slope[:, None]))
