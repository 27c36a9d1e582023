"""Arithmetic on float64 as IEEE 754 and Go's math package define it, where Python would raise or give an integer."""

import math
from collections.abc import Callable

_LN2 = math.log(2)
_LN10 = math.log(10)


def divide(left: float, right: float) -> float:
    """Quotient; by zero an infinity, or NaN."""
    if right != 0:
        return left / right
    if left == 0 or math.isnan(left):
        return math.nan
    return math.copysign(math.inf, left) * math.copysign(1.0, right)


def modulo(left: float, right: float) -> float:
    """Remainder with the sign of the dividend."""
    try:
        return math.fmod(left, right)
    except ValueError:
        return math.nan


def power(base: float, exponent: float) -> float:
    """Power; NaN for the fractional power of a negative number."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 == 1 else math.inf
    except ValueError:
        if base != 0:
            return math.nan
        return math.copysign(math.inf, base) if exponent % 2 == 1 else math.inf


def lesser(left: float, right: float) -> float:
    """Smaller of two numbers; minus infinity wins over NaN, NaN over the rest."""
    if -math.inf in {left, right}:
        return -math.inf
    return math.nan if math.isnan(left) or math.isnan(right) else min(left, right)


def greater(left: float, right: float) -> float:
    """Larger of two numbers; infinity wins over NaN, NaN over the rest."""
    if math.inf in {left, right}:
        return math.inf
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)


def floor(value: float) -> float:
    """Round down, keeping the sign of zero."""
    return math.copysign(float(math.floor(value)), value) if math.isfinite(value) else value


def ceil(value: float) -> float:
    """Round up, keeping the sign of zero."""
    return math.copysign(float(math.ceil(value)), value) if math.isfinite(value) else value


def round_to(value: float, step: float = 1.0) -> float:
    """Round to the nearest multiple of a step, halves up."""
    inverse = divide(1.0, step)
    return divide(floor(value * inverse + 0.5), inverse)


def sign(value: float) -> float:
    """-1, 0 or 1; NaN of NaN."""
    return math.copysign(1.0, value) if value < 0 or value > 0 else value


def ln(value: float) -> float:
    """Natural logarithm; minus infinity of zero, NaN of negative numbers."""
    if value > 0:
        return math.log(value)
    return -math.inf if value == 0 else math.nan


def log2(value: float) -> float:
    """Logarithm to base 2, rounded as Go rounds it, which shows close to 1."""
    if not 0 < value < math.inf:
        return ln(value)
    fraction, exponent = math.frexp(value)
    return float(exponent - 1) if fraction == 0.5 else math.log(fraction) * (1 / _LN2) + exponent  # noqa: PLR2004


def log10(value: float) -> float:
    """Logarithm to base 10, rounded as Go rounds it."""
    return log2(value) * (_LN2 / _LN10)


def radians(value: float) -> float:
    """Degrees to radians."""
    return value * math.pi / 180


def degrees(value: float) -> float:
    """Radians to degrees."""
    return value * 180 / math.pi


def atanh(value: float) -> float:
    """Inverse hyperbolic tangent, infinite at -1 and 1."""
    return math.copysign(math.inf, value) if abs(value) == 1 else _atanh(value)


def total(function: Callable[[float], float]) -> Callable[[float], float]:
    """Extend a function of the math module: NaN outside its domain, infinity on overflow."""

    def extended(value: float) -> float:
        try:
            return function(value)
        except ValueError:
            return math.nan
        except OverflowError:
            # exp, cosh and sinh: only the last is negative anywhere.
            return math.copysign(math.inf, value) if function is math.sinh else math.inf

    return extended


_atanh = total(math.atanh)
square_root = total(math.sqrt)
