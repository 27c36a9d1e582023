"""How a token is chosen from logits, and how a drafted one is checked so that the target's distribution is kept.

At temperature 0 the likeliest token is taken, and a draft is kept as long as it is the target's own choice. Above 0 a
drafted token is kept with probability min(1, p/q), where p and q are the target's and the drafter's probabilities for
it; at the first refusal the token is drawn from what p has more than q. The result is distributed as the target
alone would write it, whatever the drafter says: it only decides how many tokens one pass yields.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens."""

    tokens: list[int]
    probabilities: Tensor | None
    """[n, V] that each token was drawn from; None where the likeliest was taken."""


class Sampler:
    """Chooses tokens; one for each text, or shared by texts that are decoded one after the other.

    Args:
        temperature: 0 takes the likeliest token.
        top_p: Only the likeliest tokens that together have this probability are drawn.
        top_k: Only so many of the likeliest tokens are drawn; 0 is no limit.
        seed: Of everything that is drawn.

    Raises:
        ValueError: A value out of its range.
    """

    def __init__(self, temperature: float = 0.0, *, top_p: float = 1.0, top_k: int = 0, seed: int = 0) -> None:
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature {temperature}: must be 0 (the likeliest token) or a positive number")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p {top_p}: must be above 0 and at most 1")
        if top_k < 0:
            raise ValueError(f"top_k {top_k}: must be 0 (no limit) or more")
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        # On the CPU, so that a seed means the same on every device.
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return what tokens are drawn from: float32 probabilities [..., V] of `logits`."""
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(dim=-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A token stays while those before it do not reach top_p; so the likeliest always stays.
            ordered = ordered * (ordered.cumsum(dim=-1) - ordered < self.top_p)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities

    def only_temperature(self) -> "Sampler":
        """Return a sampler of the same temperature and random numbers that leaves no token out."""
        plain = Sampler(self.temperature)
        plain._generator = self._generator
        return plain

    def draw(self, probabilities: Tensor) -> int:
        """Draw one token from `probabilities` [V], which need not sum to 1."""
        return int(torch.multinomial(probabilities.cpu(), 1, generator=self._generator))

    def choose(self, logits: Tensor) -> int:
        """Choose one token given `logits` [V]."""
        return int(logits.argmax()) if self.greedy else self.draw(self.probabilities(logits))

    def propose(self, logits: Tensor) -> Proposal:
        """Choose one token for each row of `logits` [n, V]."""
        if self.greedy:
            return Proposal(tokens=logits.argmax(dim=-1).tolist(), probabilities=None)
        probabilities = self.probabilities(logits)
        return Proposal(tokens=[self.draw(row) for row in probabilities], probabilities=probabilities)

    def verify(self, proposal: Proposal, logits: Tensor, stop_token_ids: Collection[int]) -> list[int]:
        """Return the tokens that a draft yields: those kept and one of the target's own, cut after a stop token.

        Args:
            proposal: n drafted tokens.
            logits: [n + 1, V] of the target at the token before the first and at each of them.
            stop_token_ids: Nothing follows one of these.
        """
        if self.greedy:
            choose: Callable[[int], int] = logits.argmax(dim=-1).tolist().__getitem__
        else:
            choose = partial(self._check, proposal, self.probabilities(logits))
        gained: list[int] = []
        for position, drafted in enumerate([*proposal.tokens, None]):
            choice = choose(position)
            gained.append(choice)
            if choice != drafted or choice in stop_token_ids:
                break
        return gained

    def _check(self, proposal: Proposal, probabilities: Tensor, position: int) -> int:
        """Keep the drafted token or draw another, given the target's probabilities [n + 1, V]."""
        target = probabilities[position]
        if position == len(proposal.tokens):
            return self.draw(target)
        token = proposal.tokens[position]
        assert proposal.probabilities is not None
        drafter = proposal.probabilities[position]
        if torch.rand((), generator=self._generator) * drafter[token] < target[token]:
            return token
        surplus = (target - drafter).clamp(min=0)
        # Rounding can leave nothing where the two are equal but for it.
        return self.draw(surplus if bool(surplus.any()) else target)
