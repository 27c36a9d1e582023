"""Our decoding loop against the reference's and against plain decoding."""

import time

import dflash.model
import pytest
import torch
from tiny_models import (
    overfit,
    random_prompts,
    reference_drafter,
    tiny_config,
    tiny_drafter,
    tiny_target,
)
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from trainer.acceptance import evaluate_drafter
from trainer.drafter import Drafter
from trainer.speculate import plain, speculate

PROMPTS = random_prompts(4, seed=4)


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    """The tiny target in fp64, so that no near-tie can flip between one-token and block passes."""
    return tiny_target().double()


@pytest.fixture(scope="module", params=["full", "sliding"])
def half_trained(request: pytest.FixtureRequest) -> Drafter:
    """A drafter good enough to be accepted at every length from 1 to 4."""
    drafter, _ = overfit(tiny_target(), PROMPTS, tiny_config(request.param), num_steps=60)
    return drafter.double()


@pytest.mark.filterwarnings("ignore:.*past_key_values.*")  # the reference still uses this deprecated keyword
@pytest.mark.parametrize(("max_new_tokens", "num_stops"), [(1, 0), (2, 0), (3, 0), (5, 0), (60, 0), (60, 1)])
def test_same_tokens_and_acceptance_as_the_reference(
    target: Qwen3ForCausalLM,
    half_trained: Drafter,
    max_new_tokens: int,
    num_stops: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both loops emit the same tokens and gain the same number in every cycle, with and without a stop token."""
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)  # it would synchronise a CUDA device
    reference = reference_drafter(half_trained).double()
    gained = set()

    for prompt in PROMPTS + random_prompts(2, seed=9):
        stops = plain(target, prompt, 60).output_ids[20:][:num_stops]
        ours = speculate(half_trained, target, prompt, max_new_tokens, stops)
        theirs = dflash.model.dflash_generate(
            reference, target, torch.tensor([prompt]), max_new_tokens, stops, return_stats=True
        )
        gained.update(ours.acceptance_lengths)

        assert ours.output_ids == theirs.output_ids[0, 11:].tolist()
        assert ours.acceptance_lengths == theirs.acceptance_lengths
        assert ours.output_ids == plain(target, prompt, max_new_tokens, stops).output_ids
        assert sum(ours.acceptance_lengths) == len(ours.output_ids) - 1

    assert max_new_tokens < 60 or gained == {1, 2, 3, 4}


@torch.no_grad()
def test_greedy_equals_decoding_without_a_cache(target: Qwen3ForCausalLM) -> None:
    """The baseline is the target's own greedy text, here recomputed from scratch for every token."""
    tokens = list(PROMPTS[0])
    for _ in range(30):
        tokens.append(int(target(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))

    assert plain(target, PROMPTS[0], 30).output_ids == tokens[11:]


def test_stop_token_ends_the_text(target: Qwen3ForCausalLM, half_trained: Drafter) -> None:
    """Nothing follows the first stop token, even when a block drafted past it."""
    whole = plain(target, PROMPTS[0], 60).output_ids
    stop = whole[10]
    expected = whole[: whole.index(stop) + 1]

    assert plain(target, PROMPTS[0], 60, [stop]).output_ids == expected
    assert speculate(half_trained, target, PROMPTS[0], 60, [stop]).output_ids == expected


def test_evaluation_report(target: Qwen3ForCausalLM, half_trained: Drafter) -> None:
    """Acceptance length is the mean over prompts of the mean over cycles; the histogram counts every cycle."""
    generations = [speculate(half_trained, target, prompt, 40) for prompt in PROMPTS]
    means = [sum(g.acceptance_lengths) / len(g.acceptance_lengths) for g in generations]

    report = evaluate_drafter(half_trained, target, PROMPTS, 40)

    assert report.lossless
    assert report.accept_length == pytest.approx(sum(means) / 4)
    assert sum(report.histogram.values()) == sum(len(g.acceptance_lengths) for g in generations)
    assert sum(length * count for length, count in report.histogram.items()) == 4 * 39
    assert report.num_prompts == 4
    assert report.speedup == pytest.approx(report.tokens_per_second / report.baseline_tokens_per_second)
    assert report.tokens_per_second > 0


def test_evaluation_without_a_draft_is_refused(target: Qwen3ForCausalLM, half_trained: Drafter) -> None:
    """A report over answers of one token would be empty, so it is an error."""
    with pytest.raises(ValueError, match="nothing was drafted"):
        evaluate_drafter(half_trained, target, PROMPTS, 1)


def test_tied_llama_target_with_an_untrained_drafter() -> None:
    """Another architecture, tied embeddings: an untrained drafter gains about one token a cycle and stays lossless."""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        )
    ).eval().double()  # fmt: skip

    report = evaluate_drafter(tiny_drafter(tiny_config()), llama, PROMPTS, 20)

    assert report.lossless
    assert 1.0 <= report.accept_length < 4.0


def test_sliding_window_target(half_trained: Drafter) -> None:
    """A target with sliding windows is rolled back correctly beyond its window."""
    windowed = tiny_target(
        layer_types=["sliding_attention", "full_attention"] * 4, use_sliding_window=True, sliding_window=16
    ).double()

    assert evaluate_drafter(half_trained, windowed, PROMPTS, 40).lossless


@pytest.fixture(scope="module")
def hybrid() -> Qwen3_5ForCausalLM:
    """A target with linear-attention layers, whose state cannot be cut."""
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2,
            linear_key_head_dim=16, linear_value_head_dim=16,
        )
    ).eval().requires_grad_(False)  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(3.0)
    return model


def test_recurrent_target(hybrid: Qwen3_5ForCausalLM) -> None:
    """Rejected drafts leave no trace in a recurrent target: the text is that of decoding without a cache."""
    drafter, _ = overfit(hybrid, PROMPTS, tiny_config(), num_steps=60)

    for prompt in PROMPTS[:2]:
        generation = speculate(drafter, hybrid, prompt, 40)
        tokens = list(prompt)
        for _ in range(40):
            tokens.append(int(hybrid(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))

        assert generation.output_ids == tokens[11:]
        assert 1 in generation.acceptance_lengths
        assert max(generation.acceptance_lengths) > 1
