"""Greedy speculative decoding with a drafter and its target, and the plain decoding it is measured against.

One cycle drafts a block after the newest token, lets the target check all of it in one pass, and keeps the drafted
tokens up to the first that the target would not have chosen, plus the target's own next token. So the output is the
target's own greedy output whatever the drafter says; a drafter only makes it arrive in fewer passes.
The drafter never sees the target's hidden state at the newest token, exactly as in training.

The target is any Hugging Face causal LM; what tapped layer i put out is its `hidden_states[i + 1]`. One text at a time,
batch 1. Everything here runs in inference mode.
"""

import copy
import statistics
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by
from transformers import DynamicCache, PreTrainedModel

from trainer.anchors import block_masks
from trainer.drafter import ContextCache, Drafter
from trainer.tiled_head import HeadScale, head_logits


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generated text."""

    output_ids: list[int]
    """New tokens only; a stop token, if reached, is the last."""
    acceptance_lengths: list[int]
    """Tokens gained by each draft-and-verify cycle, the target's own included; empty for plain decoding."""
    prefill_s: float
    """Time to the first token."""
    decode_s: float
    """Time for all tokens after the first."""


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """What a drafter is worth on a set of prompts."""

    accept_length: float
    """Mean over prompts of the mean over cycles, 1 to block_size."""
    lossless: bool
    """Whether every drafted text equals the target's own greedy text, token for token."""
    tokens_per_second: float
    """Decoding speed with the drafter, prefill left out."""
    baseline_tokens_per_second: float
    """Decoding speed of the target alone, one token at a time with its cache."""
    speedup: float
    """The ratio of the two."""
    histogram: dict[int, int]
    """Acceptance length -> number of cycles, over all prompts."""
    num_prompts: int


class _TargetSession:
    """One text in the target: its cache, one pass at a time over new tokens, and a way to take back their tail.

    A cache of keys and values is cut. Recurrent state cannot be cut, so a target with such layers is copied before
    each revocable pass and replayed up to the cut: exact, at the price of the copy and of a second, shorter pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._cache.activate_past_recording()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._before: DynamicCache | None = None
        self._tokens: Tensor | None = None

    def forward(self, token_ids: list[int], *, revocable: bool, layer_ids: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Run new tokens; return their likeliest successors (just the last one's unless revocable), tapped states."""
        self._tokens = torch.tensor([token_ids], device=self._model.device)
        self._before = copy.deepcopy(self._cache) if revocable and not self._cache.is_croppable else None
        out = self._model(
            self._tokens,
            cache=self._cache,
            use_cache=True,
            output_hidden_states=bool(layer_ids),
            logits_to_keep=0 if revocable else 1,
        )
        states = [out.hidden_states[i + 1] for i in layer_ids]
        return out.logits[0].argmax(dim=-1), torch.cat(states, dim=-1) if states else out.logits[:, :, :0]

    def keep(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens of the last pass; required after each pass."""
        assert self._tokens is not None
        surplus = self._tokens.shape[1] - num_tokens
        if surplus and self._before is not None:
            self._cache, surplus = self._before, 0
            self._model(self._tokens[:, :num_tokens], cache=self._cache, use_cache=True)
        self._cache.crop(-surplus)


class _DraftSession:
    """One text in the drafter: its context cache and the borrowed embedding and head."""

    def __init__(self, drafter: Drafter, target: PreTrainedModel) -> None:
        self._drafter = drafter
        self._embedding = _weight(target.get_input_embeddings())
        self._head = _weight(target.get_output_embeddings())  # type: ignore[no-untyped-call]  # the same
        self._cache = ContextCache()

    def draft(self, anchor: int, num_drafted: int, new_states: Tensor) -> list[int]:
        """Propose `num_drafted` tokens after `anchor`, given the target's states [1, n, L*H] since the last call."""
        config, device = self._drafter.config, new_states.device
        dtype = self._drafter.fc.weight.dtype
        start = self._cache.length + new_states.shape[1]
        noise_ids = torch.full((1, 1 + num_drafted), config.mask_token_id, device=device)
        noise_ids[0, 0] = anchor
        masks = block_masks(
            torch.tensor([[start]], device=device), torch.ones(1, 1, dtype=torch.bool, device=device), start, config
        )
        # A block cut short at the length limit is the head of a whole one.
        shown = start + 1 + num_drafted
        hidden = self._drafter(
            noise_embedding=F.embedding(noise_ids, self._embedding).to(dtype) * config.input_embedding_scale,
            target_hidden=new_states.to(dtype),
            position_ids=torch.arange(self._cache.length, shown, device=device)[None],
            masks={name: mask[:, :, : 1 + num_drafted, :shown] for name, mask in masks.items()},
            cache=self._cache,
        )
        scale = HeadScale(config.output_multiplier, config.final_logit_softcapping)
        drafted: list[int] = head_logits(hidden[0, 1:], self._head, scale).argmax(dim=-1).tolist()
        return drafted


@torch.inference_mode()
def speculate(
    drafter: Drafter,
    target: PreTrainedModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> Generation:
    """Generate up to `max_new_tokens` tokens after `prompt_ids`, drafting ahead and verifying."""
    layer_ids = drafter.config.target_layer_ids
    verifier, proposer = _TargetSession(target), _DraftSession(drafter, target)
    begin = time.perf_counter()
    best, states = verifier.forward(list(prompt_ids), revocable=False, layer_ids=layer_ids)
    verifier.keep(len(prompt_ids))
    output, acceptance_lengths = [int(best[-1])], []
    prefilled = time.perf_counter()
    while len(output) < max_new_tokens and output[-1] not in stop_token_ids:
        num_drafted = min(drafter.config.block_size, max_new_tokens + 1 - len(output)) - 1
        drafted = proposer.draft(output[-1], num_drafted, states)
        best, states = verifier.forward([output[-1], *drafted], revocable=True, layer_ids=layer_ids)
        gained = _accepted(drafted, best.tolist(), stop_token_ids)[: max_new_tokens - len(output)]
        verifier.keep(len(gained))
        states = states[:, : len(gained)]
        output += gained
        acceptance_lengths.append(len(gained))
    return Generation(
        output_ids=output,
        acceptance_lengths=acceptance_lengths,
        prefill_s=prefilled - begin,
        decode_s=time.perf_counter() - prefilled,
    )


@torch.inference_mode()
def greedy(
    target: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, stop_token_ids: Collection[int] = ()
) -> Generation:
    """Generate up to `max_new_tokens` tokens with the target alone, one pass each."""
    session = _TargetSession(target)
    begin = time.perf_counter()
    best, _ = session.forward(list(prompt_ids), revocable=False)
    session.keep(len(prompt_ids))
    output = [int(best[-1])]
    prefilled = time.perf_counter()
    while len(output) < max_new_tokens and output[-1] not in stop_token_ids:
        best, _ = session.forward([output[-1]], revocable=False)
        session.keep(1)
        output.append(int(best[-1]))
    return Generation(
        output_ids=output, acceptance_lengths=[], prefill_s=prefilled - begin, decode_s=time.perf_counter() - prefilled
    )


def evaluate_drafter(
    drafter: Drafter,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> EvalReport:
    """Decode every prompt with and without the drafter and compare; dropout aside, neither model is changed.

    Raises ValueError when no prompt is answered with more than one token, as then nothing was drafted.
    """
    drafted = [speculate(drafter, target, prompt, max_new_tokens, stop_token_ids) for prompt in prompts]
    plain = [greedy(target, prompt, max_new_tokens, stop_token_ids) for prompt in prompts]
    means = [statistics.fmean(g.acceptance_lengths) for g in drafted if g.acceptance_lengths]
    if not means:
        raise ValueError("nothing was drafted: give at least one prompt whose answer is longer than one token")
    speed, baseline_speed = _tokens_per_second(drafted), _tokens_per_second(plain)
    return EvalReport(
        accept_length=statistics.fmean(means),
        lossless=[g.output_ids for g in drafted] == [g.output_ids for g in plain],
        tokens_per_second=speed,
        baseline_tokens_per_second=baseline_speed,
        speedup=speed / baseline_speed,
        histogram=dict(sorted(Counter(n for g in drafted for n in g.acceptance_lengths).items())),
        num_prompts=len(prompts),
    )


def _accepted(drafted: list[int], best: list[int], stop_token_ids: Collection[int]) -> list[int]:
    """Return the tokens a verified draft yields: the agreed ones and the target's next, cut after a stop token."""
    gained = []
    for proposal, choice in zip([*drafted, None], best, strict=True):
        gained.append(choice)
        if proposal != choice or choice in stop_token_ids:
            break
    return gained


def _tokens_per_second(generations: list[Generation]) -> float:
    return sum(len(g.output_ids) - 1 for g in generations) / sum(g.decode_s for g in generations)


def _weight(module: nn.Module | None) -> Tensor:
    weight = getattr(module, "weight", None)
    assert isinstance(weight, Tensor), "a Hugging Face causal LM has an embedding and an output head"
    return weight
