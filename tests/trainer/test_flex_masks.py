"""Flex attention's masks and results against the whole mask of the same anchors."""

import pytest
import torch
from tiny_models import tiny_config, tiny_drafter
from torch.nn.attention.flex_attention import create_mask

from trainer.anchors import AttentionName, block_masks, build_blocks, lay_out, sample_anchors
from trainer.flex_masks import flex_mask

LOSS_MASK = torch.tensor([[0] * 12 + [1] * 18, [1] * 30, [0] * 20 + [1] * 5 + [0] * 5])


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("sliding_window", [2, 8])
def test_flex_sees_what_the_whole_mask_shows(is_causal: bool | None, sliding_window: int) -> None:
    """Pair by pair the rule gives the whole mask, and its tiles are those in which that has anything to see."""
    config = tiny_config("sliding", is_causal=is_causal, sliding_window=sliding_window)
    anchors = sample_anchors(LOSS_MASK, 9, torch.Generator().manual_seed(1))
    masks = block_masks(anchors.positions, anchors.keep, 30, config)

    assert not anchors.keep.all()
    for layer_type, mask in masks.items():
        flex = flex_mask(anchors.positions, anchors.keep, 30, layer_type, config)
        num_samples, _, num_queries, num_keys = mask.shape
        assert torch.equal(create_mask(flex.mask_mod, num_samples, 1, num_queries, num_keys, "cpu"), mask)
        assert flex.to_dense().shape[-2:] == (1, 1)
        assert flex.to_dense().all()


def _states_and_gradients(attention: AttentionName, device: str) -> list[torch.Tensor]:
    """Block states of a drafter whose blocks are attended in one way and, unless disabled, parameter gradients."""
    config = tiny_config("sliding")
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(0, 90, (3, 30), generator=generator)
    target_hidden, embedding = torch.randn(3, 30, 3 * 64, generator=generator), torch.randn(97, 64, generator=generator)
    anchors = sample_anchors(LOSS_MASK, 9, generator)
    pull = torch.randn(3, 9 * config.block_size, 64, generator=generator)
    layout = lay_out(LOSS_MASK, anchors, config, attention)
    blocks = build_blocks(input_ids.to(device), LOSS_MASK, anchors, config, 4.0, layout)
    drafter = tiny_drafter(config).to(device)
    noise = embedding.to(device)[blocks.noise_ids]
    hidden = drafter(noise, target_hidden.to(device), blocks.position_ids, blocks.masks)
    if torch.is_grad_enabled():
        (hidden * pull.to(device)).sum().backward()
    return [hidden.detach(), *(parameter.grad for parameter in drafter.parameters() if parameter.grad is not None)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_computes_the_same() -> None:
    """States through flex attention, on a CPU uncompiled and without a backward pass, are those of the whole mask."""
    (flex,), (whole,) = _states_and_gradients("flex", "cpu"), _states_and_gradients("masked", "cpu")

    torch.testing.assert_close(flex, whole, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_flex_attention_learns_the_same() -> None:
    """On a GPU the compiled kernel gives the states and gradients of the whole mask."""
    for flex, whole in zip(_states_and_gradients("flex", "cuda"), _states_and_gradients("masked", "cuda"), strict=True):
        torch.testing.assert_close(flex, whole, rtol=0, atol=1e-2 * float(whole.abs().max()))
