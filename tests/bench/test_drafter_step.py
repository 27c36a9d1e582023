"""The benchmark of drafter steps really steps, and finds out when a contestant cannot."""

import sys

import pytest

from bench import drafter_step
from bench.drafter_step import Stepper
from bench.drafter_step import drafter_step as run_benchmark
from bench.step.limit import step_operations
from bench.workplace import BenchmarkError

VOCAB_SIZE = 600


def test_a_contestant_learns_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn makes steps that lower the loss, at a speed and in memory that are not nothing."""
    monkeypatch.setattr(drafter_step, "PEERS_PYTHON", sys.executable)

    with Stepper("ours", VOCAB_SIZE) as contestant:
        turns = [contestant.turn() for _ in range(2)]

    assert turns[0].loss > turns[1].loss > 0
    assert all(turn.tokens_per_second > 0 for turn in turns)
    # At least the gradients and moments of 9.7 million float32 parameters.
    assert all(turn.peak_mib > 3 * 9.7e6 * 4 / 2**20 for turn in turns)


def test_a_contestant_that_ends_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies names itself and its last words instead of hanging the bench."""
    monkeypatch.setattr(drafter_step, "PEERS_PYTHON", sys.executable)

    with (
        pytest.raises(BenchmarkError, match=r"no_such ended: .*No module named bench\.step\.no_such"),
        Stepper("no_such", VOCAB_SIZE),
    ):
        pass


def test_missing_peers_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the peers' environment the bench says what makes it."""
    monkeypatch.setattr(drafter_step, "PEERS_PYTHON", drafter_step.ROOT / "no" / "python")

    with pytest.raises(BenchmarkError, match=r"is missing: `make bench` makes"):
        run_benchmark(1)


def test_operations_grow_with_the_vocabulary() -> None:
    """The head takes two products of all learned rows, 672 of 576, and of each token more; the rest stays."""
    more = step_operations(2 * VOCAB_SIZE) - step_operations(VOCAB_SIZE)

    assert more == 2 * (2 * 672 * 576 * VOCAB_SIZE)
