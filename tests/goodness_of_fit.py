"""How far counts are from what a distribution promises."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping


def chi_square_sigmas(drawn: Iterable[Hashable], expected: Mapping[Hashable, float]) -> float:
    """Return how many standard deviations Pearson's statistic of the draws lies above its mean.

    Outcomes that were to be expected less than five times are taken together. The cube root makes the statistic
    nearly normal (Wilson and Hilferty), so 3 is reached by chance about once in 700 times.
    """
    counts = Counter(drawn)
    number = counts.total()
    assert counts.keys() <= expected.keys(), "an impossible outcome was drawn"
    common = [outcome for outcome, probability in expected.items() if probability * number >= 5]
    cells = [(counts[outcome], expected[outcome] * number) for outcome in common]
    rest = number - sum(count for count, _ in cells), number - sum(mean for _, mean in cells)
    if rest[1] >= 1e-3:
        cells.append(rest)
    freedom = len(cells) - 1
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)
