"""Choosing tokens: what is drawn, and that checking a draft keeps the target's distribution whatever was drafted."""

import dflash.model
import pytest
import torch
from goodness_of_fit import chi_square_sigmas
from torch import Tensor

from trainer.sampling import Proposal, Sampler

TARGET = torch.tensor([[0.5, 0.2, 0.2, 0.1, 0.0], [0.1, 0.1, 0.2, 0.3, 0.3], [0.2, 0.2, 0.2, 0.2, 0.2]])
DRAFTERS = {
    "far off": torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.6], [0.6, 0.1, 0.1, 0.1, 0.1]]),
    "close": torch.tensor([[0.45, 0.25, 0.2, 0.1, 0.0], [0.1, 0.1, 0.25, 0.25, 0.3]]),
    "sure and wrong": torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0]]),
    "the target itself": TARGET[:2],
}


def draft_and_check(sampler: Sampler, drafter: Tensor) -> tuple[int, ...]:
    """One cycle; a text that ends early goes on with the target's own draws, so that all are three tokens long."""
    proposal = Proposal(tokens=[sampler.draw(row) for row in drafter], probabilities=drafter)
    gained = sampler.verify(proposal, TARGET.log(), stop_token_ids=())
    return (*gained, *(sampler.draw(row) for row in TARGET[len(gained) :]))


@pytest.mark.parametrize("name", DRAFTERS)
def test_checked_drafts_are_distributed_as_the_target(name: str) -> None:
    """4,000 cycles of two drafted tokens and a bonus fit the target's joint distribution of all 125 outcomes."""
    sampler = Sampler(1.0, seed=5)
    joint = torch.einsum("a,b,c->abc", *TARGET)
    expected = {tuple(index): float(joint[tuple(index)]) for index in (joint > 0).nonzero().tolist()}

    drawn = [draft_and_check(sampler, DRAFTERS[name]) for _ in range(4000)]

    assert chi_square_sigmas(drawn, expected) < 3


def test_the_fit_notices_a_wrong_distribution() -> None:
    """Drafts that are kept unchecked fail the same test by far, already where the drafter is close."""
    sampler = Sampler(1.0, seed=5)
    drawn = [sampler.draw(DRAFTERS["close"][0]) for _ in range(4000)]

    assert chi_square_sigmas(drawn, dict(enumerate(TARGET[0, :4].tolist()))) > 5


@pytest.mark.parametrize(("name", "rate"), [("sure and wrong", 0.0), ("close", 0.95), ("the target itself", 1.0)])
def test_as_many_drafts_are_kept_as_the_distributions_overlap(name: str, rate: float) -> None:
    """The first drafted token is kept as often as the two distributions have probability in common."""
    sampler, drafter = Sampler(1.0, seed=1), DRAFTERS[name][:1]
    kept = 0
    for _ in range(2000):
        proposal = Proposal(tokens=[sampler.draw(drafter[0])], probabilities=drafter)
        kept += len(sampler.verify(proposal, TARGET[:2].log(), stop_token_ids=())) - 1

    assert kept / 2000 == pytest.approx(rate, abs=0.02)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 3), (0.5, 4), (0.01, 0), (1.0, 50)])
def test_probabilities_are_the_references(top_p: float, top_k: int) -> None:
    """Temperature, top-k and top-p, in this order, leave the same probabilities as the reference package."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2)) * 3

    ours = Sampler(0.7, top_p=top_p, top_k=top_k).probabilities(logits)

    torch.testing.assert_close(ours, dflash.model._sampling_probs(logits, 0.7, top_p, top_k))


def test_stop_token_ends_what_is_kept() -> None:
    """Nothing is gained after a stop token, drafted or not, greedy or drawn."""
    certain = torch.full((3, 5), -torch.inf)
    certain[[0, 1, 2], [3, 4, 1]] = 0.0
    proposal = Proposal(tokens=[3, 4], probabilities=certain[:2].exp())

    for sampler in (Sampler(), Sampler(1.0)):
        assert sampler.verify(proposal, certain, stop_token_ids=()) == [3, 4, 1]
        assert sampler.verify(proposal, certain, stop_token_ids={4}) == [3, 4]
        assert sampler.verify(proposal, certain, stop_token_ids={3}) == [3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1: must be 0"),
        ({"temperature": float("nan")}, "temperature nan: must be 0"),
        ({"top_p": 0.0}, "top_p 0.0: must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k -1: must be 0"),
    ],
)
def test_values_out_of_range(settings: dict[str, float], message: str) -> None:
    """Each is refused by name, with its range."""
    with pytest.raises(ValueError, match=message):
        Sampler(**settings)  # type: ignore[arg-type]
