"""Speculative decoding with a drafter and its target, and the plain decoding it is measured against.

One cycle drafts a block after the newest token, lets the target check all of it in one pass, and keeps the drafted
tokens up to the first that the target would not have chosen, plus the target's own next token. So the output is the
target's own whatever the drafter says, token for token where the likeliest is taken and in distribution where tokens
are drawn; a drafter only makes it arrive in fewer passes.
The drafter never sees the target's hidden state at the newest token, exactly as in training.
"""

import itertools
import operator
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from trainer.drafter import Drafter
from trainer.sampling import Sampler
from trainer.sessions import DraftSession, TargetSession


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generated text."""

    output_ids: list[int]
    """New tokens only; a stop token, if reached, is the last."""
    acceptance_lengths: list[int]
    """Tokens gained by each draft-and-verify cycle, the target's own included; empty for plain decoding."""
    num_drafted: list[int] = field(default_factory=list)
    """Tokens drafted in each of those cycles."""
    num_kept: list[int] = field(default_factory=list)
    """Of those, how many became part of the text."""
    prefill_s: float
    """Time to the first token."""
    decode_s: float
    """Time for all tokens after the first."""


@torch.inference_mode()
def speculate(
    drafter: Drafter,
    target: PreTrainedModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    sampler: Sampler | None = None,
) -> Generation:
    """Generate up to `max_new_tokens` tokens after `prompt_ids`, drafting ahead and verifying."""
    sampler = sampler or Sampler()
    layer_ids = drafter.config.target_layer_ids
    verifier, proposer = TargetSession(target), DraftSession(drafter, target, sampler)
    begin = time.perf_counter()
    logits, states = verifier.forward(list(prompt_ids), revocable=False, layer_ids=layer_ids)
    verifier.keep(len(prompt_ids))
    output, cycles = [sampler.choose(logits[-1])], list[tuple[int, int, int]]()
    prefilled = time.perf_counter()
    while len(output) < max_new_tokens and output[-1] not in stop_token_ids:
        num_drafted = min(drafter.config.block_size, max_new_tokens + 1 - len(output)) - 1
        proposal = proposer.draft(output[-1], num_drafted, states)
        logits, states = verifier.forward([output[-1], *proposal.tokens], revocable=True, layer_ids=layer_ids)
        gained = sampler.verify(proposal, logits, stop_token_ids)[: max_new_tokens - len(output)]
        verifier.keep(len(gained))
        states = states[:, : len(gained)]
        output += gained
        cycles.append((len(gained), len(proposal.tokens), _num_same(proposal.tokens, gained)))
    return Generation(
        output_ids=output,
        acceptance_lengths=[gained for gained, _, _ in cycles],
        num_drafted=[drafted for _, drafted, _ in cycles],
        num_kept=[kept for _, _, kept in cycles],
        prefill_s=prefilled - begin,
        decode_s=time.perf_counter() - prefilled,
    )


@torch.inference_mode()
def plain(
    target: PreTrainedModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    sampler: Sampler | None = None,
) -> Generation:
    """Generate up to `max_new_tokens` tokens with the target alone, one pass each."""
    sampler, session = sampler or Sampler(), TargetSession(target)
    begin = time.perf_counter()
    logits, _ = session.forward(list(prompt_ids), revocable=False)
    session.keep(len(prompt_ids))
    output = [sampler.choose(logits[-1])]
    prefilled = time.perf_counter()
    while len(output) < max_new_tokens and output[-1] not in stop_token_ids:
        logits, _ = session.forward([output[-1]], revocable=False)
        session.keep(1)
        output.append(sampler.choose(logits[-1]))
    return Generation(
        output_ids=output, acceptance_lengths=[], prefill_s=prefilled - begin, decode_s=time.perf_counter() - prefilled
    )


def _num_same(drafted: list[int], gained: list[int]) -> int:
    """How many tokens the two have in common from the start."""
    return sum(itertools.takewhile(bool, map(operator.eq, drafted, gained)))
