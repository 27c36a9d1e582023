"""Triton kernels against their torch twins: interpreted on any machine, compiled where there is a GPU."""

from collections.abc import Callable

import pytest
import torch
from kernel_copies import copy_of_kernels
from torch import Tensor

from trainer.tiled_head import HeadScale, RunningSoftmax, cross_entropy, fold_logits

Fold = Callable[[Tensor, int, RunningSoftmax, HeadScale], None]
SCALES = [HeadScale(1.0, None), HeadScale(0.25, None), HeadScale(2.0, 5.0)]
NUM_ROWS, NUM_TOKENS, TILE = 9, 301, 100


@pytest.fixture
def interpreted_fold(monkeypatch: pytest.MonkeyPatch) -> Fold:
    """The kernel's launcher, interpreted."""
    fold: Fold = copy_of_kernels(monkeypatch, interpreted=True).fold_logits
    return fold


def _folded(fold: Fold, products: Tensor, labels: Tensor, scale: HeadScale) -> tuple[RunningSoftmax, Tensor]:
    """Fold all tiles, the last one smaller; return what is known then and what the kernel left of the products."""
    running, left = RunningSoftmax.start(labels), products.clone()
    for first_token in range(0, products.shape[1], TILE):
        fold(left[:, first_token : first_token + TILE], first_token, running, scale)
    return running, left


def _products(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Products and labels; one row's largest occurs twice, in two tiles, another's is in the last tile's last place."""
    generator = torch.Generator().manual_seed(4)
    products = (4 * torch.randn(NUM_ROWS, NUM_TOKENS, generator=generator)).to(dtype)
    products[0, [150, 250]] = 30.0
    products[1, -1] = 31.0
    labels = torch.randint(0, NUM_TOKENS, (NUM_ROWS,), generator=generator)
    labels[:3] = torch.tensor([250, NUM_TOKENS - 1, 0])
    return products, labels


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted_kernel_equals_torch(interpreted_fold: Fold, scale: HeadScale, dtype: torch.dtype) -> None:
    """Tile by tile the kernel leaves the same statistics, and the same weights in the products' place."""
    products, labels = _products(dtype)

    running, left = _folded(interpreted_fold, products, labels, scale)
    twin, twin_left = _folded(fold_logits, products, labels, scale)

    assert running.prediction.tolist() == twin.prediction.tolist()
    assert running.prediction[0] == 150
    assert running.prediction[1] == NUM_TOKENS - 1
    for name in ("maximum", "normalizer", "rescale", "label_logit"):
        torch.testing.assert_close(getattr(running, name), getattr(twin, name), rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(left, twin_left, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_torch_twin_equals_log_softmax(scale: HeadScale) -> None:
    """Folded over all tiles, cross entropy and likeliest token are those of the whole logits."""
    products, labels = _products(torch.float32)
    logits = products * scale.multiplier
    if scale.softcap is not None:
        logits = scale.softcap * torch.tanh(logits / scale.softcap)

    running, _ = _folded(fold_logits, products, labels, scale)

    expected = -logits.log_softmax(dim=1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(running.cross_entropy(), expected, rtol=1e-5, atol=1e-5)
    assert running.prediction.tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scale", SCALES)
def test_gpu_equals_cpu(scale: HeadScale) -> None:
    """Loss, gradient and predictions through the compiled kernel are those of the CPU."""
    generator = torch.Generator().manual_seed(5)
    rows, head = torch.randn(300, 64, generator=generator), torch.randn(20_000, 64, generator=generator)
    labels = torch.randint(0, 20_000, (300,), generator=generator)
    on_cpu, on_gpu = rows.clone().requires_grad_(), rows.cuda().requires_grad_()

    expected, expected_predictions = cross_entropy(on_cpu, head, labels, scale)
    losses, predictions = cross_entropy(on_gpu, head.cuda(), labels.cuda(), scale)
    expected.sum().backward()
    losses.sum().backward()

    torch.testing.assert_close(losses.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert (predictions.cpu() == expected_predictions).float().mean() > 0.99
    assert on_gpu.grad is not None
    torch.testing.assert_close(on_gpu.grad.cpu(), on_cpu.grad, rtol=1e-3, atol=1e-3)
