"""The arithmetic of the benchmarks, and the file that others read."""

from pathlib import Path

import msgspec
import pytest

from bench.__main__ import DEFAULT_OUTPUT, main
from bench.contestants import StepEnd, turn_of
from bench.machine import disturbance
from bench.made_up_trainers import declare_everything
from bench.results import Goal, Result, alone, compare, quantile, table, write
from bench.workplace import BenchmarkError
from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells

CONTRACT = {"name", "value", "unit", "peer", "peer_value", "ratio", "goal", "goal_met", "spread"}


def test_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    """A round in which the machine was slow for both sides does not move the ratio."""
    result = compare("speed", "1/s", [99.0, 49.5, 98.0], "nothing", [100.0, 50.0, 100.0])

    assert (result.value, result.peer_value, result.ratio) == (98.0, 100.0, 0.99)
    assert result.spread.value == (49.5, 99.0)
    assert result.spread.ratio == (0.98, 0.99)
    assert result.spread.rounds == 3


def test_rounds_that_do_not_pair_up_are_refused() -> None:
    """A list that lacks a round cannot be compared in silence."""
    with pytest.raises(ValueError, match="shorter"):
        compare("speed", "1/s", [1.0, 2.0], "nothing", [1.0])


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal("value", "<=", 100.0), True),
        (Goal("value", "<=", 99.0), False),
        (Goal("value", ">=", 100.0), True),
        (Goal("value", ">=", 101.0), False),
        (Goal("ratio", ">=", 0.5), True),
        (Goal("ratio", ">=", 0.51), False),
        (Goal("ratio", "<=", 0.49), False),
    ],
)
def test_goals_hold_at_their_bound_and_not_beyond(goal: Goal, met: bool) -> None:
    """A goal is met at its bound; it looks at the value or at the ratio, in its own direction."""
    assert compare("x", "ns", [100.0], "peer", [200.0], goal).goal_met is met


def test_goal_of_a_ratio_without_a_peer_is_not_met() -> None:
    """What was not compared cannot have kept a ratio."""
    assert alone("x", "ns", [1.0], Goal("ratio", ">=", 0.0)).goal_met is False


def test_quantile_covers_at_least_its_share() -> None:
    """The quantile is one of the values; the highest share is the maximum."""
    values = [float(value) for value in range(1000, 0, -1)]

    assert quantile(values, 0.5) == 501.0
    assert quantile(values, 0.999) == 1000.0
    assert quantile([3.0], 0.99) == 3.0


def test_one_disturbed_sample_makes_the_machine_disturbed() -> None:
    """The worst sample counts: a benchmark beside another job is not saved by a quiet one before it."""
    assert disturbance([0.0, 0.01, 0.02]).goal_met is True
    assert disturbance([0.0, 0.0, 0.9]).goal_met is False


def test_file_has_the_fields_that_scripts_read(tmp_path: Path) -> None:
    """The file is a list of objects with exactly the promised fields; what does not apply is null."""
    write([alone("a", "ns", [2.0, 1.0]), compare("b", "s", [1.0], "peer", [2.0])], tmp_path / "results.json")

    first, second = msgspec.json.decode((tmp_path / "results.json").read_bytes())

    assert first.keys() == second.keys() == CONTRACT
    assert first["peer"] is first["ratio"] is first["goal_met"] is None
    assert (first["value"], second["ratio"]) == (1.5, 0.5)
    assert (first["spread"]["measure"], first["spread"]["value"]) == ("min..max", [1.0, 2.0])


def test_committed_file_reads_back() -> None:
    """The results in the repository are of this form, and say how busy the machine was."""
    results = msgspec.json.decode(DEFAULT_OUTPUT.read_bytes(), type=list[Result])

    assert results[0].name == "other_load"
    assert len({result.name for result in results}) == len(results)


def test_table_points_at_missed_goals() -> None:
    """A missed goal stands out, a met one says yes, and one that was not set says nothing."""
    rows = table(
        [
            alone("missed", "ns", [101.0], Goal("value", "<=", 100.0)),
            alone("met", "ns", [1234.5], Goal("value", "<=", 2000.0)),
            alone("free", "ns", [1.0]),
        ]
    ).splitlines()

    assert rows[1].endswith("value <= 100 ns   NO")
    assert rows[2].endswith("value <= 2000 ns  yes")
    assert "1,234 ns" in rows[2]
    assert rows[3].endswith("1..1")


def test_turn_is_measured_between_the_ends_of_steps() -> None:
    """The first step of a turn began before it, so it only says when the second one began, and what it had cost."""
    turn = turn_of([StepEnd(10.0, 1.0), StepEnd(10.5, 1.25), StepEnd(11.0, 1.5), StepEnd(11.5, 1.75)], "ours")

    assert turn == (2.0, 0.25)


def test_turn_with_hardly_a_step_is_an_error() -> None:
    """A speed is not made up out of one or two steps."""
    with pytest.raises(BenchmarkError, match="ours made only 2 steps"):
        turn_of([StepEnd(10.0, 1.0), StepEnd(10.5, 1.25)], "ours")


def test_made_up_trainer_has_every_family() -> None:
    """Who adds a family to the catalogue need not think of the benchmarks, unless its label is new."""
    cells = Cells(TRAINER_FAMILIES)
    declare_everything(cells)

    assert {family.name for _, family, _ in cells.schema().layout()} == {family.name for family in TRAINER_FAMILIES}


def test_unknown_benchmark_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A part that no name has names those there are, and nothing runs."""
    assert main(["--only", "nonsense"]) == 2

    assert "--only takes part of counter_update, publish_500_series" in capsys.readouterr().err
