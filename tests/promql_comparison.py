"""What it means that two engines agree about an expression."""

import math

from sidecar.promql.engine import evaluate
from sidecar.promql.values import PromqlError, Vector
from sidecar.store import Store

TOLERANCE = 1e-9
"""Relative difference of two values that still count as the same."""


def ours(expression: str, store: Store, time_s: float) -> float | Vector | None:
    """Evaluate with the engine; None when it refuses."""
    try:
        return evaluate(expression, store, time_s)
    except PromqlError:
        return None


def agrees(actual: float, expected: float) -> bool:
    """Tell whether two values agree, NaN with NaN."""
    if math.isnan(actual) or math.isnan(expected):
        return math.isnan(actual) and math.isnan(expected)
    return math.isclose(actual, expected, rel_tol=TOLERANCE, abs_tol=0)


def assert_same(actual: float | Vector | None, expected: float | Vector | None) -> None:
    """Fail unless both are refusals, or numbers that agree, or vectors of the same labels whose values agree."""
    if isinstance(actual, list) and isinstance(expected, list):
        values = dict(expected)
        labels = sorted(labels for labels, _ in actual)
        assert labels == sorted(values), f"labels {labels}, expected {sorted(values)}"
        differing = [(labels, value, values[labels]) for labels, value in actual if not agrees(value, values[labels])]
        assert differing == [], f"labels, value, expected value: {differing}"
    elif isinstance(actual, float) and isinstance(expected, float):
        assert agrees(actual, expected), f"{actual}, expected {expected}"
    else:
        assert actual == expected, f"{actual}, expected {expected}"
