"""What a drafter is worth on a set of prompts: how many tokens a pass of the target yields, and the time it saves."""

import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from trainer.drafter import Drafter
from trainer.sampling import Sampler
from trainer.speculate import Generation, plain, speculate


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """What a drafter is worth on a set of prompts."""

    accept_length: float
    """Mean over prompts of the mean over cycles, 1 to block_size."""
    lossless: bool | None
    """Whether every drafted text equals the target's own, token for token; None where tokens are drawn."""
    tokens_per_second: float
    """Decoding speed with the drafter, prefill left out."""
    baseline_tokens_per_second: float
    """Decoding speed of the target alone, one token at a time with its cache."""
    speedup: float
    """The ratio of the two."""
    acceptance_by_position: list[float]
    """For each drafted slot, the first one first: share of its drafts that were kept, with all before them."""
    histogram: dict[int, int]
    """Acceptance length -> number of cycles, over all prompts."""
    num_prompts: int
    temperature: float = 0.0


def evaluate_drafter(
    drafter: Drafter,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    sampler: Sampler | None = None,
) -> EvalReport:
    """Decode every prompt with and without the drafter and compare; dropout aside, neither model is changed.

    Raises ValueError when no prompt is answered with more than one token, as then nothing was drafted.
    """
    sampler = sampler or Sampler()
    drafted = [speculate(drafter, target, prompt, max_new_tokens, stop_token_ids, sampler) for prompt in prompts]
    alone = [plain(target, prompt, max_new_tokens, stop_token_ids, sampler) for prompt in prompts]
    means = [statistics.fmean(g.acceptance_lengths) for g in drafted if g.acceptance_lengths]
    if not means:
        raise ValueError("nothing was drafted: give at least one prompt whose answer is longer than one token")
    speed, baseline_speed = _tokens_per_second(drafted), _tokens_per_second(alone)
    return EvalReport(
        accept_length=statistics.fmean(means),
        lossless=[g.output_ids for g in drafted] == [g.output_ids for g in alone] if sampler.greedy else None,
        tokens_per_second=speed,
        baseline_tokens_per_second=baseline_speed,
        speedup=speed / baseline_speed,
        acceptance_by_position=acceptance_by_position(drafted, drafter.config.block_size - 1),
        histogram=dict(sorted(Counter(n for g in drafted for n in g.acceptance_lengths).items())),
        num_prompts=len(prompts),
        temperature=sampler.temperature,
    )


def acceptance_by_position(generations: Sequence[Generation], num_slots: int) -> list[float]:
    """Return for each of the slots 1 to `num_slots` the share of its drafts that were kept; 0 where none was made."""
    num_drafted, num_kept = Counter[int](), Counter[int]()
    for generation in generations:
        for drafted, kept in zip(generation.num_drafted, generation.num_kept, strict=True):
            num_drafted.update(range(drafted))
            num_kept.update(range(kept))
    return [num_kept[slot] / max(num_drafted[slot], 1) for slot in range(num_slots)]


def _tokens_per_second(generations: Sequence[Generation]) -> float:
    return sum(len(g.output_ids) - 1 for g in generations) / sum(g.decode_s for g in generations)
