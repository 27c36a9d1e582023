"""The drafter against the reference package, and what it promises about precision and initial weights."""

import dflash.model
import msgspec
import pytest
import torch
from tiny_models import SECOND, VOCAB_SIZE, reference_drafter, tapped, tiny_config, tiny_drafter, tiny_target
from torch import Tensor

from trainer.anchors import Anchors, BlockBatch, block_masks, build_blocks
from trainer.drafter import ContextCache, Drafter, Rotary
from trainer.drafter_config import DrafterConfig, build_target_layer_ids

ANCHORS = [0, 3, 9, 10, 33, 38]

VARIANTS = [
    pytest.param({"layout": "full"}, id="full"),
    pytest.param({"layout": "sliding"}, id="sliding"),
    pytest.param({"layout": "sliding", "is_causal": True}, id="all causal"),
    pytest.param({"layout": "sliding", "is_causal": False}, id="none causal"),
    pytest.param({"layout": "sliding", "is_causal": False, "sliding_window": 2}, id="window within the block"),
    pytest.param({"layout": "sliding", **SECOND}, id="DFlash 2"),
    pytest.param({"layout": "full", **SECOND, "conv_kernel_size": 3, "conv_group_size": 8}, id="wide convolution"),
    pytest.param({"layout": "full", "rope_theta": 10_000.0, "rms_norm_eps": 1e-3}, id="other theta and eps"),
]


def _packed(config: DrafterConfig) -> tuple[Tensor, Tensor, BlockBatch]:
    """Return tapped states, noise embedding and blocks of one 40-token sample."""
    target = tiny_target()
    input_ids = torch.randint(0, 90, (1, 40), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([ANCHORS])
    anchors = Anchors(positions=positions, keep=torch.ones_like(positions, dtype=torch.bool), num_valid=6, num_used=6)
    blocks = build_blocks(input_ids, torch.ones_like(input_ids), anchors, config, decay_gamma=4.0)
    noise_embedding = target.get_input_embeddings()(blocks.noise_ids)
    return tapped(target, input_ids, config), noise_embedding, blocks


@pytest.mark.parametrize("changes", VARIANTS)
@torch.no_grad()
def test_packed_forward_equals_one_reference_call_per_anchor(changes: dict[str, object]) -> None:
    """Training on many blocks at once computes for each exactly what the reference computes when it drafts there."""
    config = tiny_config(**changes)  # type: ignore[arg-type]
    drafter = tiny_drafter(config)
    reference = reference_drafter(drafter)
    target_hidden, noise_embedding, blocks = _packed(config)
    size = config.block_size

    packed = drafter(noise_embedding, target_hidden, blocks.position_ids, blocks.masks)

    for i, anchor in enumerate(ANCHORS):
        block = slice(i * size, (i + 1) * size)
        alone = reference(
            position_ids=torch.arange(anchor + size)[None],
            noise_embedding=noise_embedding[:, block],
            target_hidden=target_hidden[:, :anchor],
        )
        torch.testing.assert_close(packed[:, block], alone, rtol=0, atol=1e-5)


def test_second_kind_starts_as_the_first() -> None:
    """Fresh convolutions are the identity, a fresh selector prefers nothing: DFlash 2 starts where DFlash does."""
    plain, second = Drafter(tiny_config()), Drafter(tiny_config(**SECOND))
    faults = second.load_state_dict(plain.state_dict(), strict=False)
    target_hidden, noise_embedding, blocks = _packed(plain.config)
    inputs = (noise_embedding, target_hidden, blocks.position_ids, blocks.masks)
    hidden = second(*inputs)

    assert not faults.unexpected_keys
    assert torch.equal(hidden, plain(*inputs))
    assert second.candidate_selector is not None
    own, tokens = torch.rand(1, 6), torch.arange(6)[None]
    assert torch.equal(second.candidate_selector.scores(hidden[0, :1], torch.tensor([3]), own, tokens), own)


@pytest.mark.parametrize("changes", [{"layout": "full"}, {"layout": "sliding"}, SECOND])
@torch.no_grad()
def test_drafting_with_a_cache_equals_drafting_without(changes: dict[str, object]) -> None:
    """Feeding the context in pieces through the cache gives the same block as feeding all of it at once."""
    config = tiny_config(**changes)  # type: ignore[arg-type]
    drafter = tiny_drafter(config)
    target_hidden, noise_embedding, _ = _packed(config)
    block = noise_embedding[:, : config.block_size]
    cache = ContextCache()

    for shown, new in [(5, slice(0, 5)), (6, slice(5, 6)), (20, slice(6, 20))]:
        masks = block_masks(torch.tensor([[shown]]), torch.tensor([[True]]), shown, config)
        positions = torch.arange(shown + config.block_size)[None]
        whole = drafter(block, target_hidden[:, :shown], positions, masks)
        pieces = drafter(block, target_hidden[:, new], positions[:, new.start :], masks, cache)

        assert cache.length == shown
        torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-5)


def test_bf16_autocast_stays_close_and_keeps_fp32_parameters() -> None:
    """Under bf16 autocast the output follows fp32 to bf16 precision and gradients arrive in fp32 parameters."""
    config = tiny_config("sliding")
    drafter = tiny_drafter(config, weight_factor=1.0)
    target_hidden, noise_embedding, blocks = _packed(config)
    exact = drafter(noise_embedding, target_hidden, blocks.position_ids, blocks.masks)

    with torch.autocast("cpu", torch.bfloat16):
        rounded = drafter(noise_embedding.bfloat16(), target_hidden.bfloat16(), blocks.position_ids, blocks.masks)
    rounded.float().square().sum().backward()

    assert torch.nn.functional.cosine_similarity(rounded.float(), exact, dim=-1).min() > 0.999
    for name, parameter in drafter.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_rotary_angles_do_not_depend_on_the_models_dtype() -> None:
    """Angles far into a text are as exact after `.to(bfloat16)` as before, because they are never stored."""
    drafter = Drafter(tiny_config()).to(torch.bfloat16)
    positions = torch.tensor([[100_000]])
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)

    angles = Rotary.at(positions, drafter.config.head_dim, drafter.config.rope_theta)

    assert list(drafter.buffers()) == []
    torch.testing.assert_close(angles.cos[0, 0, 0, :8].double(), (100_000 * inv_freq).cos(), rtol=0, atol=1e-2)


def test_initial_weights() -> None:
    """Weights are N(0, 0.02) from the given generator, norms are one, and nothing else is trainable."""
    config = tiny_config(hidden_size=256, target_hidden_size=256, vocab_size=VOCAB_SIZE)
    drafter = Drafter(config, torch.Generator().manual_seed(7))
    twin = Drafter(config, torch.Generator().manual_seed(7))

    for (name, parameter), other in zip(drafter.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, other), name
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.mean().item() == pytest.approx(0.0, abs=2e-3), name
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name


@pytest.mark.parametrize(
    ("num_layers", "num_taps"), [(36, 5), (32, 5), (40, 5), (64, 5), (8, 3), (8, 1), (5, 2), (6, 3)]
)
def test_target_layer_ids_are_the_references(num_layers: int, num_taps: int) -> None:
    """Taps are spread as the reference spreads them."""
    expected = dflash.model.build_target_layer_ids(num_layers, num_taps)

    assert list(build_target_layer_ids(num_layers, num_taps)) == expected


@pytest.mark.parametrize(("num_layers", "num_taps"), [(4, 3), (3, 2), (1, 1), (5, 4)])
def test_too_few_target_layers(num_layers: int, num_taps: int) -> None:
    """A target too shallow for distinct taps is refused with the remedy."""
    with pytest.raises(ValueError, match="ask for fewer taps or name target_layer_ids"):
        build_target_layer_ids(num_layers, num_taps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 97}, "mask_token_id=97 must be a row of the embedding, 0 to 96"),
        ({"target_layer_ids": (1, 7)}, r"target_layer_ids=\[1, 7\] must ascend within 0 to 6"),
        ({"target_layer_ids": (3, 1)}, r"target_layer_ids=\[3, 1\] must ascend"),
        ({"target_layer_ids": ()}, r"target_layer_ids=\[\] must ascend"),
        ({"hidden_size": 32}, "hidden_size=32 must equal target_hidden_size=64"),
        ({"num_hidden_layers": 2}, "layer_types must have num_hidden_layers=2 entries"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"block_size": 1}, "block_size=1 must be at least 2"),
        ({"layout": "sliding", "sliding_window": None}, "sliding_window=None must be positive"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0 must be positive"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"selector_rank": 8}, "set conv_kernel_size to selector_top_k together or not at all"),
        ({**SECOND, "conv_group_size": 24}, "conv_group_size=24 must divide hidden_size=64"),
        ({**SECOND, "selector_top_k": 98}, "selector_top_k=98 must be at most vocab_size=97"),
    ],
)
def test_contradicting_config_is_refused(changes: dict[str, object], message: str) -> None:
    """Each contradiction raises one error that names the field and its bounds."""
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)  # type: ignore[arg-type]


def test_config_survives_json() -> None:
    """A config written as JSON reads back equal; a wrong field is named by its path."""
    config = tiny_config("sliding", is_causal=False)
    data = msgspec.json.encode(config)

    assert msgspec.json.decode(data, type=DrafterConfig) == config
    with pytest.raises(msgspec.ValidationError, match=r"\$\.head_dim"):
        msgspec.json.decode(data.replace(b'"head_dim":16', b'"head_dim":0'), type=DrafterConfig)
