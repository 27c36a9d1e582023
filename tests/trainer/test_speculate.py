"""Our decoding loop against the reference's and against plain decoding."""

import time

import dflash.model
import pytest
import torch
from goodness_of_fit import chi_square_sigmas
from tiny_models import (
    SECOND,
    overfit,
    random_prompts,
    reference_drafter,
    tiny_config,
    tiny_drafter,
    tiny_target,
)
from tiny_targets import tiny_of
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from trainer.acceptance import evaluate_drafter
from trainer.drafter import Drafter
from trainer.sampling import Sampler
from trainer.speculate import plain, speculate

PROMPTS = random_prompts(4, seed=4)


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    """The tiny target in fp64, so that no near-tie can flip between one-token and block passes."""
    return tiny_target().double()


@pytest.fixture(scope="module", params=["full", "sliding", "DFlash 2"])
def half_trained(request: pytest.FixtureRequest) -> Drafter:
    """A drafter good enough to be accepted at every length from 1 to 4."""
    config = tiny_config(**SECOND) if request.param == "DFlash 2" else tiny_config(request.param)
    drafter, _ = overfit(tiny_target(), PROMPTS, config, num_steps=60)
    if drafter.candidate_selector is not None:
        # Untrained it would prefer nothing; drawn at random it decides some of the slots.
        torch.nn.init.normal_(drafter.candidate_selector.successor_codebook, generator=torch.Generator().manual_seed(3))
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

    assert max_new_tokens < 60 or num_stops or gained == {1, 2, 3, 4}


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
    assert report.acceptance_by_position == sorted(report.acceptance_by_position, reverse=True)
    for slot, share in enumerate(report.acceptance_by_position):
        drafted = [kept for g in generations for n, kept in zip(g.num_drafted, g.num_kept, strict=True) if n > slot]
        assert share == pytest.approx(sum(kept > slot for kept in drafted) / len(drafted))
    assert report.speedup == pytest.approx(report.tokens_per_second / report.baseline_tokens_per_second)
    assert report.tokens_per_second > 0


@pytest.mark.parametrize("changes", [{}, SECOND], ids=["DFlash", "DFlash 2"])
def test_drawn_texts_are_distributed_as_the_target(changes: dict[str, int]) -> None:
    """The first three tokens of 600 drafted texts fit the target's own distribution of all 216 beginnings."""
    config = tiny_config(
        vocab_size=6, mask_token_id=5, num_hidden_layers=1, layer_types=("full_attention",), block_size=3,
        num_target_layers=3, target_layer_ids=(0, 1), **changes,
    )  # fmt: skip
    drafter, target, prompt = tiny_drafter(config), tiny_target(vocab_size=6, num_hidden_layers=3), [1, 4, 2]
    beginnings = torch.cartesian_prod(*[torch.arange(6)] * 3)
    with torch.no_grad():
        logits = target(torch.cat([torch.tensor(prompt).expand(216, -1), beginnings], dim=1)).logits[:, 2:5]
    chances = logits.softmax(dim=-1).gather(-1, beginnings[..., None]).prod(dim=1)[:, 0]
    expected = dict(zip(map(tuple, beginnings.tolist()), chances.tolist(), strict=True))
    sampler = Sampler(1.0, seed=7)

    drawn = [speculate(drafter, target, prompt, 3, sampler=sampler) for _ in range(600)]

    assert chi_square_sigmas([tuple(g.output_ids) for g in drawn], expected) < 3
    assert {len(g.acceptance_lengths) for g in drawn} == {1, 2}


def test_drawn_report(target: Qwen3ForCausalLM, half_trained: Drafter) -> None:
    """Drawn texts are not compared token for token; near temperature 0 as many drafts are kept as at 0."""
    cold = evaluate_drafter(half_trained, target, PROMPTS, 40, sampler=Sampler(1e-4))

    assert cold.lossless is None
    assert cold.temperature == 1e-4
    assert cold.accept_length == evaluate_drafter(half_trained, target, PROMPTS, 40).accept_length


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


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_5_moe_text", "qwen3_5"])
def hybrid(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A target with recurrent layers, whose state cannot be cut."""
    target = tiny_of(request.param)
    if "moe" in request.param:
        target.set_experts_implementation("eager")  # the fused experts know no fp64
    return target.double()


@pytest.mark.filterwarnings("ignore")  # transformers warns that its fast kernels are missing on a CPU
def test_recurrent_target(hybrid: PreTrainedModel) -> None:
    """Rejected drafts leave no trace in a recurrent target: the text is that of decoding without a cache."""
    prompts = random_prompts(2, seed=4)
    drafter, _ = overfit(hybrid, prompts, tiny_config(), num_steps=40)
    drafter = drafter.double()
    generations = [speculate(drafter, hybrid, prompt, 40) for prompt in prompts]

    for prompt, generation in zip(prompts, generations, strict=True):
        tokens = list(prompt)
        for _ in range(40):
            with torch.no_grad():
                logits = hybrid(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))

        assert generation.output_ids == tokens[11:]
        assert plain(hybrid, prompt, 40).output_ids == tokens[11:]
    gained = {length for generation in generations for length in generation.acceptance_lengths}
    assert 1 in gained
    assert max(gained) > 1
