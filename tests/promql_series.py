"""Series with everything that an engine can stumble over, the same on each call.

All samples lie a fraction of a second off whole seconds, except those named `exact`, so that windows closed on the
left (Prometheus 2) and open ones hold the same. Series that begin inside a window begin at zero, because the two limit
the extrapolation to the zero point in different order otherwise.
"""

import math
import random
from collections.abc import Iterator

from sidecar.samples import Sample, labels_of

START_S = 1_750_000_000
LENGTH_S = 420
TIMES_S = (START_S + 7, START_S + 61, START_S + 180, START_S + 299, START_S + 420, START_S + 700)


def hand_made(seed: int = 20) -> list[Sample]:
    """Every kind of series at once."""
    rng = random.Random(seed)
    return [*_counters(rng), *_histograms(rng), *_torn_histograms(), *_gauges(rng), *_corners()]


def _counters(rng: random.Random) -> Iterator[Sample]:
    """Counters: with resets, with gaps and jitter, born late at zero, gone early."""
    for role, worker in [("target", "0"), ("target", "1"), ("drafter", "0"), ("drafter", "2")]:
        value = rng.uniform(0, 1e6)
        for second in range(LENGTH_S):
            value = 0.0 if rng.random() < 0.02 else value + rng.expovariate(0.1)
            yield Sample("jobs_total", labels_of(role=role, worker=worker), START_S + second + 0.25, value)
    value = 1e9
    for second in range(LENGTH_S):
        value += rng.uniform(0, 3)
        if rng.random() < 0.3 and not 100 < second < 160:
            yield Sample("patchy_total", (), START_S + second + rng.choice((0.2, 0.456, 0.75)), value)
    for second in range(50, LENGTH_S):
        yield Sample("late_total", labels_of(role="target", worker="0"), START_S + second + 0.25, (second - 50) * 0.1)
    for second in range(0, 170, 5):
        yield Sample("gone_total", labels_of(role="target", worker="1"), START_S + second + 0.25, second * 2.0)


def _histograms(rng: random.Random) -> Iterator[Sample]:
    """A histogram per role, one of them empty until the middle."""
    for role, first in (("drafter", 0), ("target", 200)):
        counts = dict.fromkeys(("1.0", "2.5", "10.0", "+Inf"), 0.0)
        for second in range(LENGTH_S):
            length = rng.lognormvariate(1, 1)
            for bound in counts:
                counts[bound] += second > first and length <= float(bound)
                yield Sample("length_bucket", labels_of(le=bound, role=role), START_S + second + 0.25, counts[bound])


def _torn_histograms() -> Iterator[Sample]:
    """Histograms as they should not be, each under its own label `case`, and a second name with the same labels."""
    cases = {
        "falling": {"1": 5.0, "2": 3.0, "+Inf": 7.0},
        "negative": {"-2": 1.0, "-1": 4.0, "3": 9.0, "+Inf": 9.0},
        "twice": {"1": 2.0, "1.0": 1.0, "2": 6.0, "+Inf": 6.0, "Inf": 2.0},
        "no_end": {"1": 2.0, "2": 6.0},
        "no_number": {"1": 2.0, "x": 4.0, "1_0": 5.0, " 3": 6.0, "+Inf": 8.0},
        "only_end": {"+Inf": 3.0},
        "nan": {"1": math.nan, "2": 4.0, "+Inf": math.nan},
        "rounding": {"1": 1e9, "2": 1e9 + 1e-6, "3": 1e9 - 1e-6, "+Inf": 1e9 + 5},
        "exponents": {"1e-1": 2.0, "1e1": 5.0, "+Inf": 5.0},
    }
    for name, names in (("torn_bucket", cases), ("split_bucket", ("twice", "nan"))):
        for case in names:
            for bound, count in cases[case].items():
                yield Sample(name, labels_of(case=case, le=bound), START_S + 2.5, count)
                yield Sample(name, labels_of(case=case, le=bound), START_S + 200.5, count + 1)


def _gauges(rng: random.Random) -> Iterator[Sample]:
    """Gauges: queue depths that share labels with capacities, values no gauge should have, and noise."""
    for queue, worker in [("a", "0"), ("a", "1"), ("b", "0"), ("c", "0")]:
        for second in range(LENGTH_S):
            labels = labels_of(queue=queue, worker=worker, role="target")
            yield Sample("depth", labels, START_S + second + 0.75, float(rng.randint(0, 9) if second else 0))
    yield from _noise(rng)
    for queue, flavour, capacity in [("a", "sweet", 8.0), ("b", "sour", 4.0), ("d", "dry", 1.0)]:
        for second in range(0, LENGTH_S, 15):
            yield Sample("capacity", labels_of(queue=queue, flavour=flavour), START_S + second + 0.75, capacity)
    for worker in ("0", "1", "2"):
        for second in range(LENGTH_S):
            value = rng.choice((math.nan, math.inf, -math.inf, 1.0, 2.5, -3.0, 4e300))
            yield Sample("odd", labels_of(role="target", worker=worker), START_S + second + 0.75, value)


def _noise(rng: random.Random) -> Iterator[Sample]:
    """Series with many labels, of very different size and density."""
    for index in range(9):
        labels = labels_of(**{f"label_{place}": str(index // 3**place % 3) for place in range(12)}, index=str(index))
        for second in range(0, LENGTH_S, 1 + index):
            yield Sample("noise", labels, START_S + second + 0.75, rng.gauss(0, 10.0**index))


def _corners() -> Iterator[Sample]:
    """Values at the edges of what functions are defined for."""
    angles = (-1e300, -40.0, -1.0, -0.5, -0.0, 0.0, 1e-9, 0.5, 1.0, 1.0000001, math.pi, 2.0, 720.0, 1e18, math.nan)
    for index, angle in enumerate((*angles, math.inf, -math.inf)):
        yield Sample("angle", labels_of(index=str(index)), START_S + 5.5, angle)
        yield Sample("angle", labels_of(index=str(index)), START_S + 305.5, angle)
    days = (-86_401.0, -1.5, 0.0, 951_782_399.9, 951_868_800.0, 1.7e9, 4_107_542_400.0, -2.2e9, 6.4e10)
    for index, day in enumerate(days):
        yield Sample("day", labels_of(index=str(index)), START_S + 5.5, day)
    for second, value in enumerate((1e16, 1.0, -1e16, 3e-5, 1e100, 1.0, -1e100, 7.0)):
        yield Sample("cancelling", (), START_S + second + 0.5, value)
        yield Sample("large", (), START_S + second + 0.5, 1e9 + value % 3e-6)
        yield Sample("overflowing", labels_of(index=str(second)), START_S + 0.5, math.copysign(1.7e308, value))
        yield Sample("constant", (), START_S + second + 0.5, 0.1)
    yield Sample("quoted", labels_of(text='a "b" \\ c\nd', other="ü"), START_S + 0.5, 1.0)
    for second in range(0, 60, 10):
        yield Sample("exact_total", labels_of(role="target"), START_S + second, float(second + 3))
