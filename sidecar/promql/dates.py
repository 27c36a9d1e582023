"""The parts of a date in UTC of a time in Unix seconds, for any number there is."""

from collections.abc import Callable
from typing import NamedTuple

SECONDS_PER_DAY = 86_400
_DAYS_PER_ERA = 146_097
"""Days in the 400 years after which the calendar repeats."""
_EPOCH_DAY = 719_468
"""Days from 1 March of the year 0, where eras begin, to 1 January 1970."""
_INT64_LIMIT = 2**63


class Date(NamedTuple):
    """A day; months and days count from 1, days of the week from 0, a Sunday."""

    year: int
    month: int
    day: int
    day_of_week: int

    @property
    def is_leap_year(self) -> bool:
        """Whether the year has a 29 February."""
        return self.year % 4 == 0 and (self.year % 100 != 0 or self.year % 400 == 0)

    @property
    def days_in_month(self) -> int:
        """Length of the month."""
        if self.month == 2:  # noqa: PLR2004 - February
            return 29 if self.is_leap_year else 28
        return 31 - (self.month - 1) % 7 % 2

    @property
    def day_of_year(self) -> int:
        """Days since the year began, 1 for its first."""
        return (367 * self.month - 362) // 12 + self.day - self._february_days_short

    @property
    def _february_days_short(self) -> int:
        """By how much the days before this month are fewer than if February had 30."""
        return 0 if self.month <= 2 else 2 - self.is_leap_year  # noqa: PLR2004 - February


def date_at(seconds: int) -> Date:
    """Return the day of a time; the Gregorian calendar is carried on in both directions for ever."""
    days = seconds // SECONDS_PER_DAY
    era, day_of_era = divmod(days + _EPOCH_DAY, _DAYS_PER_ERA)
    year_of_era = (day_of_era - day_of_era // 1_460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_march_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    march_month = (5 * day_of_march_year + 2) // 153
    month = march_month + 3 if march_month < 10 else march_month - 9  # noqa: PLR2004 - January is the tenth after March
    return Date(
        year=era * 400 + year_of_era + (month <= 2),  # noqa: PLR2004 - February
        month=month,
        day=day_of_march_year - (153 * march_month + 2) // 5 + 1,
        day_of_week=(days + 4) % 7,
    )


def of_time(part: Callable[[int], int]) -> Callable[[float], float]:
    """Turn a part of a time in whole seconds into a function of float seconds.

    What is no 64-bit integer, NaN too, is the second after the last one, in the year 292277026596, as in Prometheus.
    """

    def of_seconds(time_s: float) -> float:
        return float(part(int(time_s) if abs(time_s) < _INT64_LIMIT else _INT64_LIMIT))

    return of_seconds


PARTS: dict[str, Callable[[float], float]] = {
    "minute": of_time(lambda seconds: seconds // 60 % 60),
    "hour": of_time(lambda seconds: seconds // 3_600 % 24),
    "day_of_week": of_time(lambda seconds: date_at(seconds).day_of_week),
    "day_of_month": of_time(lambda seconds: date_at(seconds).day),
    "day_of_year": of_time(lambda seconds: date_at(seconds).day_of_year),
    "days_in_month": of_time(lambda seconds: date_at(seconds).days_in_month),
    "month": of_time(lambda seconds: date_at(seconds).month),
    "year": of_time(lambda seconds: date_at(seconds).year),
}
