"""What became of each check, and how one that fails leaves the others alone."""

import time
import traceback
from collections.abc import Callable
from typing import Literal

import msgspec

Figures = dict[str, float | int | str | bool | list[str] | None]
"""Measured values by name; the name ends in the unit."""
Check = Callable[[Figures], str]
"""Fills in figures and returns a line for people; raises CheckFailedError or CheckSkippedError."""


class CheckFailedError(Exception):
    """The machine or the product is not as it should be."""


class CheckSkippedError(Exception):
    """This machine, now, cannot show it."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One check and what became of it."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str
    seconds: float
    figures: Figures

    def __str__(self) -> str:
        """The line for people."""
        return f"{self.outcome:8} {self.name:18} {self.detail}"


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found; `passed` if nothing failed."""

    passed: bool
    seconds: float
    machine: Figures
    checks: tuple[Outcome, ...]


def attempt(name: str, check: Check) -> Outcome:
    """Carry out a check, whatever happens in it."""
    start_s, figures = time.monotonic(), Figures()
    result: Literal["passed", "failed", "skipped"] = "failed"
    try:
        detail = check(figures)
        result = "passed"
    except CheckSkippedError as reason:
        detail, result = str(reason), "skipped"
    except CheckFailedError as failure:
        detail = str(failure)
    except Exception as failure:  # noqa: BLE001 - a mistake in one check must not hide what the others found
        where = traceback.extract_tb(failure.__traceback__)[-1]
        detail = f"{type(failure).__name__}: {failure} ({where.filename}:{where.lineno})"
    seconds = round(time.monotonic() - start_s, 3)
    return Outcome(name=name, outcome=result, detail=detail, seconds=seconds, figures=figures)
