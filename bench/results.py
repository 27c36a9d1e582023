"""What a benchmark found, as `results.json` and as a table for people.

Each benchmark runs in rounds: in every round ours and its peer are measured one after the other, so that whatever slows
the machine down for a while slows both. A figure is the median over the rounds, and a ratio the median of the rounds'
own ratios; the spread is their smallest and largest.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

Range = tuple[float, float]


class Goal(msgspec.Struct, frozen=True):
    """A bound that the median has to keep."""

    subject: Literal["value", "ratio"]
    relation: Literal[">=", "<="]
    bound: float

    def is_met(self, value: float, ratio: float | None) -> bool:
        """Tell whether a value, or its ratio to the peer's, keeps the bound."""
        subject = value if self.subject == "value" else ratio
        if subject is None:
            return False
        return subject >= self.bound if self.relation == ">=" else subject <= self.bound

    def text(self, unit: str) -> str:
        """The goal as people write it."""
        return f"{self.subject} {self.relation} {self.bound:g}{f' {unit}' if self.subject == 'value' else ''}"


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Smallest and largest of the rounds."""

    measure: Literal["min..max"] = "min..max"
    rounds: int
    value: Range
    peer_value: Range | None = None
    ratio: Range | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `ratio` is `value` divided by `peer_value`, whichever of the two is better when small."""

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    goal: str | None = None
    goal_met: bool | None = None
    spread: Spread


def alone(
    name: str,
    unit: str,
    values: Sequence[float],
    goal: Goal | None = None,
    figure: Callable[[Sequence[float]], float] = median,
) -> Result:
    """A result that has no peer; `figure` makes one value of the rounds'."""
    value = figure(values)
    return Result(
        name=name,
        value=value,
        unit=unit,
        goal=goal.text(unit) if goal else None,
        goal_met=goal.is_met(value, None) if goal else None,
        spread=Spread(rounds=len(values), value=_range(values)),
    )


def compare(
    name: str, unit: str, values: Sequence[float], peer: str, peer_values: Sequence[float], goal: Goal | None = None
) -> Result:
    """A result beside its peer's; both lists are in the order of the rounds."""
    ratios = [value / peer_value for value, peer_value in zip(values, peer_values, strict=True)]
    value, ratio = median(values), median(ratios)
    return Result(
        name=name,
        value=value,
        unit=unit,
        peer=peer,
        peer_value=median(peer_values),
        ratio=ratio,
        goal=goal.text(unit) if goal else None,
        goal_met=goal.is_met(value, ratio) if goal else None,
        spread=Spread(rounds=len(values), value=_range(values), peer_value=_range(peer_values), ratio=_range(ratios)),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def write(results: Sequence[Result], path: Path) -> None:
    """Write the list as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


def table(results: Sequence[Result]) -> str:
    """The results as aligned columns."""
    rows: list[tuple[str, ...]] = [("name", "value", "min..max", "peer", "peer value", "ratio", "goal", "met")]
    rows += [_row(result) for result in results]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def number(value: float) -> str:
    """Four significant digits, with thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"  # noqa: PLR2004 - from here on digits are enough


def _row(result: Result) -> tuple[str, ...]:
    low, high = result.spread.value
    met = {None: "", True: "yes", False: "NO"}[result.goal_met]
    return (
        result.name,
        f"{number(result.value)} {result.unit}",
        f"{number(low)}..{number(high)}",
        result.peer or "",
        "" if result.peer_value is None else number(result.peer_value),
        "" if result.ratio is None else f"{result.ratio:.4g}",
        result.goal or "",
        met,
    )


def _range(values: Sequence[float]) -> Range:
    return min(values), max(values)
