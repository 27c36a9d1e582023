"""Where drafter workers meet at the end of a step."""

import threading

import pytest
import torch
from torch import nn

from trainer.rank import Rank
from trainer.reduce import FlatGradients, Outcome, Reduction, Share
from trainer.stopping import Stop
from trainer.world import World


def meet(reduction: Reduction, values: list[torch.Tensor]) -> dict[int, Outcome | BaseException]:
    """Let every worker arrive in a thread of its own; returns what each got."""
    got: dict[int, Outcome | BaseException] = {}

    def arrive(worker: int) -> None:
        share = Share((worker,), (10 + worker,), num_padding=0, num_valid_anchors=1, num_used_anchors=1)
        try:
            got[worker] = reduction.reduce(worker, values[worker], share)
        except (RuntimeError, threading.BrokenBarrierError) as error:
            got[worker] = error

    threads = [threading.Thread(target=arrive, args=(worker,)) for worker in range(len(values))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(10)
    return got


def test_all_workers_get_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in several chunks: bits of the sum in the order of the workers, everybody's batches, nobody stops."""
    monkeypatch.setattr("trainer.reduce.CHUNK_VALUES", 3)
    values = [torch.randn(10, generator=torch.Generator().manual_seed(worker)) for worker in range(3)]
    expected = values[0] + values[1] + values[2]

    got = meet(Reduction(3, World(Rank()), Stop()), values)

    assert all(torch.equal(value, expected) for value in values)
    assert [share.lengths for share in got[0].shares] == [(10,), (11,), (12,)]  # type: ignore[union-attr]
    assert {(outcome.batch_indices, outcome.stop) for outcome in got.values()} == {((0, 1, 2), False)}  # type: ignore[union-attr]


def test_a_stop_is_for_all() -> None:
    """Every worker learns at the same step that the run is to end."""
    stop = Stop()
    stop.request()

    got = meet(Reduction(2, World(Rank()), stop), [torch.zeros(1), torch.zeros(1)])

    assert [outcome.stop for outcome in got.values()] == [True, True]  # type: ignore[union-attr]


def test_a_failing_meeting_has_one_culprit() -> None:
    """When adding up fails, one worker has the error and the other a broken barrier; nobody hangs."""
    got = meet(Reduction(2, World(Rank()), Stop()), [torch.zeros(4), torch.zeros(3)])

    assert sorted(type(outcome).__name__ for outcome in got.values()) == ["BrokenBarrierError", "RuntimeError"]


def test_gradients_are_parts_of_one_tensor() -> None:
    """Backward passes add into the flat tensor, behind which there is room for sums; `clear` empties both."""
    model = nn.Linear(3, 2)
    flat = FlatGradients(model, num_sums=2)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()

    assert flat.all.tolist() == [2.0] * 8 + [0.0] * 2
    flat.sums.add_(1)
    flat.clear()
    assert not flat.all.any()
    assert model.bias.grad is not None
    assert not model.bias.grad.any()
