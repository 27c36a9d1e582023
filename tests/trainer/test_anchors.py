"""What is drawn, what a block sees, and what it is taught, against definitions written as plain loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import MASK_TOKEN_ID, tiny_config, tiny_drafter
from torch import Tensor

from trainer import anchors as anchors_module
from trainer.anchors import Anchors, NoValidAnchorsError, block_masks, build_blocks, lay_out, sample_anchors
from trainer.attention import GroupedView
from trainer.drafter_config import DrafterConfig

LOSS_MASKS = st.integers(1, 24).flatmap(
    lambda length: st.lists(st.lists(st.integers(0, 1), min_size=length, max_size=length), min_size=1, max_size=3)
)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _valid(row: list[int]) -> set[int]:
    return {a for a in range(len(row) - 1) if row[a] and row[a + 1]}


@given(rows=LOSS_MASKS, num_anchors=st.integers(1, 30), seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_anchors_are_drawn_from_valid_positions(rows: list[list[int]], num_anchors: int, seed: int) -> None:
    """Every row gets its slots filled, ascending and distinct, with as many valid positions as it has room for."""
    if not any(_valid(row) for row in rows):
        with pytest.raises(NoValidAnchorsError):
            sample_anchors(torch.tensor(rows), num_anchors, _generator(seed))
        return

    anchors = sample_anchors(torch.tensor(rows), num_anchors, _generator(seed))

    assert anchors.positions.shape == anchors.keep.shape == (len(rows), num_anchors)
    assert anchors.num_valid == sum(len(_valid(row)) for row in rows)
    assert anchors.num_used == int(anchors.keep.sum())
    for row, positions, keep in zip(rows, anchors.positions.tolist(), anchors.keep.tolist(), strict=True):
        drawn = positions[: sum(keep)]
        assert len(drawn) == min(num_anchors, len(_valid(row)))
        assert set(drawn) <= _valid(row)
        assert drawn == sorted(set(drawn))
        assert keep == [True] * len(drawn) + [False] * (num_anchors - len(drawn))
        assert positions[len(drawn) :] == [0] * (num_anchors - len(drawn))


def test_drawing_is_uniform_and_repeatable() -> None:
    """Each valid position is drawn equally often over many draws; the same generator state draws the same."""
    loss_mask = torch.tensor([[0] * 3 + [1] * 9]).expand(4000, -1)

    anchors = sample_anchors(loss_mask, 2, _generator(1))
    counts = torch.bincount(anchors.positions.flatten(), minlength=12)

    assert counts[:3].tolist() == [0, 0, 0]
    assert counts[11].item() == 0
    assert counts[3:11].tolist() == pytest.approx([1000] * 8, rel=0.12)
    assert torch.equal(anchors.positions, sample_anchors(loss_mask, 2, _generator(1)).positions)
    assert not torch.equal(anchors.positions, sample_anchors(loss_mask, 2, _generator(2)).positions)


def test_no_valid_anchor_names_the_remedy() -> None:
    """Supervised tokens that never follow each other give nothing to learn, and the error says what to do."""
    with pytest.raises(NoValidAnchorsError, match=r"none of the 2 samples .* drop such samples"):
        sample_anchors(torch.tensor([[0, 1, 0, 1], [0, 0, 0, 1]]), 4, _generator())


def _visible(config: DrafterConfig, layer_type: str, anchors: Anchors, num_context: int) -> Tensor:
    """Spell the visibility rule out for every (query, key) pair."""
    size, window = config.block_size, config.sliding_window
    num_samples, num_blocks = anchors.positions.shape
    mask = torch.zeros(num_samples, 1, num_blocks * size, num_context + num_blocks * size, dtype=torch.bool)
    sliding = layer_type == "sliding_attention"
    causal = config.is_causal if config.is_causal is not None else sliding
    for sample in range(num_samples):
        for query in range(num_blocks * size):
            block, offset = divmod(query, size)
            anchor, keep = int(anchors.positions[sample, block]), bool(anchors.keep[sample, block])
            for key in range(mask.shape[-1]):
                if key < num_context:
                    visible, distance = keep and key < anchor, anchor + offset - key
                else:
                    key_block, key_offset = divmod(key - num_context, size)
                    distance = offset - key_offset
                    visible = key_block == block and (distance >= 0 or not causal)
                if sliding:
                    assert window is not None
                    visible = visible and abs(distance) < window
                mask[sample, 0, query, key] = visible
    return mask


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("sliding_window", [1, 3, 8])
def test_masks_follow_the_visibility_rule(is_causal: bool | None, sliding_window: int) -> None:
    """A block sees context before its anchor and itself, within window and causality; a padded one only itself."""
    config = tiny_config("sliding", is_causal=is_causal, sliding_window=sliding_window)
    loss_mask = torch.tensor([[0] * 2 + [1] * 14, [0] * 6 + [1] * 3 + [0] * 7])
    anchors = sample_anchors(loss_mask, 5, _generator())

    masks = block_masks(anchors.positions, anchors.keep, 16, config)

    assert not anchors.keep.all()
    assert set(masks) == {"full_attention", "sliding_attention"}
    for layer_type, mask in masks.items():
        assert torch.equal(mask, _visible(config, layer_type, anchors, 16))
        assert mask.any(dim=-1).all()


def test_labels_weights_ids_and_positions() -> None:
    """Slot k is taught the token at anchor + k with weight exp(-(k-1)/gamma), unless unsupervised or past the end."""
    config = tiny_config()
    input_ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17]])
    loss_mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1]])
    positions, keep = torch.tensor([[1, 4, 6, 0]]), torch.tensor([[True, True, True, False]])
    decay = [1.0, math.exp(-0.5), math.exp(-1.0)]

    blocks = build_blocks(
        input_ids, loss_mask, Anchors(positions=positions, keep=keep, num_valid=5, num_used=3), config, decay_gamma=2.0
    )

    masked = [MASK_TOKEN_ID] * 3
    assert blocks.noise_ids.view(4, 4).tolist() == [[11, *masked], [14, *masked], [16, *masked], [96, *masked]]
    assert blocks.position_ids[0, :8].tolist() == list(range(8))
    assert blocks.position_ids[0, 8:].view(4, 4).tolist() == [[1, 2, 3, 4], [4, 5, 6, 7], [6, 7, 8, 9], [0, 1, 2, 3]]
    assert blocks.labels[0, :2].tolist() == [[11, 12, 13, 14], [14, 15, 16, 17]]
    assert blocks.labels[0, 2, :2].tolist() == [16, 17]
    expected = [[0, decay[0], 0, decay[2]], [0, *decay], [0, decay[0], 0, 0], [0] * 4]
    torch.testing.assert_close(blocks.weights[0], torch.tensor(expected), rtol=1e-6, atol=0)
    assert (blocks.num_valid_anchors, blocks.num_used_anchors) == (5, 3)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["full", "sliding"])
def test_padding_changes_nothing(layout: str) -> None:
    """A short sample padded beside a longer one is drafted as if alone, and what fills the padding does not matter."""
    config = tiny_config(layout)
    drafter = tiny_drafter(config)
    generator = _generator(3)
    input_ids = torch.randint(0, 90, (1, 12), generator=generator)
    target_hidden = torch.randn(1, 12, 3 * 64, generator=generator)
    loss_mask = torch.tensor([[0] * 3 + [1] * 9])
    anchors = sample_anchors(loss_mask, 12, generator)
    embedding = torch.randn(config.vocab_size, 64, generator=generator)

    alone = build_blocks(input_ids, loss_mask, anchors, config, 4.0)
    padded = build_blocks(
        torch.nn.functional.pad(input_ids, (0, 8), value=5),
        torch.nn.functional.pad(loss_mask, (0, 8)),
        anchors,
        config,
        4.0,
    )
    filler = torch.full((1, 8, 3 * 64), 1e4)
    hidden_alone = drafter(embedding[alone.noise_ids], target_hidden, alone.position_ids, alone.masks)
    hidden_padded = drafter(
        embedding[padded.noise_ids], torch.cat([target_hidden, filler], dim=1), padded.position_ids, padded.masks
    )

    assert torch.equal(alone.weights, padded.weights)
    assert torch.equal(alone.labels[alone.weights > 0], padded.labels[padded.weights > 0])
    assert hidden_padded.isfinite().all()
    torch.testing.assert_close(hidden_padded, hidden_alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["full", "sliding"])
@pytest.mark.parametrize("group_positions", [1, 8, 1000], ids=["block by block", "two blocks", "all"])
def test_laid_out_blocks_learn_the_same(layout: str, group_positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups that see only the context they need, blocks give the same states, and parameters the same gradients."""
    monkeypatch.setattr(anchors_module, "GROUP_POSITIONS", group_positions)
    config = tiny_config(layout)
    generator = _generator(3)
    input_ids = torch.randint(0, 90, (3, 30), generator=generator)
    target_hidden, embedding = torch.randn(3, 30, 3 * 64, generator=generator), torch.randn(97, 64, generator=generator)
    loss_mask = torch.tensor([[0] * 12 + [1] * 18, [1] * 30, [0] * 20 + [1] * 5 + [0] * 5])
    anchors = sample_anchors(loss_mask, 9, generator)
    plan = lay_out(loss_mask, anchors, config)
    pull = torch.randn(3, 9 * config.block_size, 64, generator=generator)
    states, grads = [], []

    for blocks in (
        build_blocks(input_ids, loss_mask, anchors, config, 4.0),
        build_blocks(input_ids, loss_mask, anchors, config, 4.0, plan),
    ):
        drafter = tiny_drafter(config)
        hidden = drafter(embedding[blocks.noise_ids], target_hidden, blocks.position_ids, blocks.masks)
        (hidden * pull).sum().backward()
        states.append(hidden.detach())
        grads.append([parameter.grad for parameter in drafter.parameters()])

    assert not anchors.keep.all()
    assert all(isinstance(mask, GroupedView) for mask in blocks.masks.values())
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=1e-5)
    for mine, whole in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(mine, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))
    assert blocks.learned_slots is not None
    assert blocks.learned_slots.tolist() == blocks.weights.flatten().nonzero()[:, 0].tolist()


def test_groups_leave_out_what_nobody_sees() -> None:
    """Groups of blocks hold the context before their last anchor and, with a window, after its reach; nothing else."""
    config = tiny_config("sliding", sliding_window=8)
    positions = torch.tensor([[20, 21, 60, 61], [22, 30, 50, 0]])
    keep = torch.tensor([[True] * 4, [True] * 3 + [False]])
    loss_mask = torch.ones(2, 64)

    spans = lay_out(loss_mask, Anchors(positions=positions, keep=keep, num_valid=9, num_used=7), config).spans

    assert [(s.first_context, s.last_context) for s in spans["full_attention"]] == [(0, 61)]
    assert [(s.first_context, s.last_context) for s in spans["sliding_attention"]] == [(13, 61)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchors_module, "GROUP_POSITIONS", 8)
        spans = lay_out(loss_mask, Anchors(positions=positions, keep=keep, num_valid=9, num_used=7), config).spans
    assert [(s.first_query, s.last_query) for s in spans["full_attention"]] == [(0, 8), (8, 16)]
    assert [(s.first_context, s.last_context) for s in spans["full_attention"]] == [(0, 30), (0, 61)]
    assert [(s.first_context, s.last_context) for s in spans["sliding_attention"]] == [(13, 30), (43, 61)]
