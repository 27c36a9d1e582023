"""A check ends in one of three ways, and never takes another one with it."""

import pytest

from bench.gpu_check.gpu_tests import check_gpu_tests
from bench.gpu_check.outcome import Check, CheckFailedError, CheckSkippedError, Figures, attempt


def raising(error: Exception) -> Check:
    """A check that measures something and then ends badly."""

    def check(figures: Figures) -> str:
        figures["measured_s"] = 1.5
        raise error

    return check


@pytest.mark.parametrize(
    ("error", "outcome", "detail"),
    [
        (CheckFailedError("too hot"), "failed", "too hot"),
        (CheckSkippedError("no sensor"), "skipped", "no sensor"),
        (ZeroDivisionError("division by zero"), "failed", "ZeroDivisionError: division by zero ("),
    ],
)
def test_what_was_measured_before_the_end_is_kept(error: Exception, outcome: str, detail: str) -> None:
    """Failed, skipped or broken: the figures so far and the reason are in the outcome."""
    found = attempt("check", raising(error))

    assert (found.outcome, found.figures) == (outcome, {"measured_s": 1.5})
    assert found.detail.startswith(detail)


def test_tests_that_take_too_long_are_a_failure() -> None:
    """Pytest is ended at its time limit, which the outcome names."""
    found = attempt("tests", lambda figures: check_gpu_tests(figures, ["--version"], 0.01))

    assert (found.outcome, found.detail) == ("failed", "not done after 0 s")


def test_a_test_that_passes_is_counted() -> None:
    """One real test of this suite, by a pytest of its own, is a pass with its count; a name that is none fails."""
    name = "tests/trainer/test_step_mailbox.py"
    good = attempt("tests", lambda figures: check_gpu_tests(figures, [name], 60.0))
    bad = attempt("tests", lambda figures: check_gpu_tests(figures, [f"{name}::none"], 60.0))

    assert (good.outcome, good.figures["tests_passed"]) == ("passed", 5), good
    assert bad.outcome == "failed"
    assert "::none" in bad.detail
