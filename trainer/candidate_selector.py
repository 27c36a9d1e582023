"""The candidate selector of a DFlash 2 drafter: slots are not filled one by one, but as a path.

Each slot of a block keeps its likeliest few tokens. How well one of them follows the token chosen just before it is a
product of two short vectors, one looked up for each of the pair, weighted by what the drafter thinks at that slot. The
path starts at the anchor and takes at every slot the best sum of that and of the slot's own logit, or draws from it.

The reference does not say how a selector is trained, so ours is not: a fresh one prefers no pair, and with it a drafter
proposes what it would without. It is here to decode with published weights, and so that a trained DFlash 2
drafter has all the tensors that a reader looks for.

Shapes: R drafted rows, H hidden size, V vocabulary, C candidates, E selector rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by


class CandidateSelector(nn.Module):
    """Scores which token follows which; it starts indifferent and is not trained.

    Args:
        hidden_size: Of the drafter's output, H.
        vocab_size: V.
        rank: Length E of the vectors.
        num_candidates: Tokens C that each slot keeps.
    """

    def __init__(self, hidden_size: int, vocab_size: int, rank: int, num_candidates: int) -> None:
        super().__init__()
        self.num_candidates = num_candidates
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.requires_grad_(requires_grad=False)

    @torch.no_grad()
    def reset(self, std: float, generator: torch.Generator | None) -> None:
        """Draw the vectors of predecessors; those of successors are zero, so all pairs start equal."""
        self.predecessor_codebook.normal_(std=std, generator=generator)
        self.successor_codebook.zero_()

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and token ids [..., C] of the likeliest tokens."""
        return torch.topk(logits, self.num_candidates, dim=-1, sorted=False)

    def scores(self, hidden: Tensor, predecessors: Tensor, own: Tensor, tokens: Tensor) -> Tensor:
        """Score candidates `tokens` [R, C] with logits `own` after `predecessors` [R], given `hidden` [R, H]."""
        pair = F.embedding(predecessors, self.predecessor_codebook) * self.hidden_projection(hidden)
        return own + torch.einsum("re,rce->rc", pair, F.embedding(tokens, self.successor_codebook).to(pair.dtype))

    def path(
        self, hidden: Tensor, logits: Tensor, anchor: int, choose: Callable[[Tensor], int]
    ) -> tuple[Tensor, Tensor]:
        """Choose a token for each row of `hidden` [R, H], one after the other.

        Args:
            hidden: The drafter's output at the slots after the anchor.
            logits: [R, V] of the same slots.
            anchor: Token before the first slot.
            choose: Picks an index out of the scores [C] of one slot.

        Returns:
            Token ids [R] and, for whoever checks them, all scores spread over the vocabulary, -inf elsewhere [R, V].
        """
        own, tokens = self.candidates(logits)
        spread = torch.full_like(logits, -torch.inf)
        chosen = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        predecessor = torch.tensor([anchor], device=hidden.device)
        for row in range(len(hidden)):
            at = slice(row, row + 1)
            scores = self.scores(hidden[at], predecessor, own[at], tokens[at]).to(logits.dtype)
            spread[row, tokens[row]] = scores[0]
            predecessor = chosen[at] = tokens[row, choose(scores[0])][None]
        return chosen, spread
