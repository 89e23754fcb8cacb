"""What a month will cost, as a range. Invariant: exact integers; a forecast is never below what is spent already."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

WINDOWS: Final = (7, 28)
"""Whole days whose average rate is continued."""
DAY: Final = timedelta(days=1)
_TICK: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class SpendForecast:
    """The month's amount at its end, in pico-units of money."""

    low_pico: int
    high_pico: int


def month_forecast(spent_pico: int, days: Mapping[date, int], now: datetime) -> SpendForecast | None:
    """Add to what the month has cost so far the time that is left at a daily rate: the average of the last 7 whole days, and
    that of the last 28. The lower and the higher of the two are the range.

    `days`: pico-units by day (UTC), where a day without use may be absent. A tenant's average begins with its first day of
    use. None without a whole day of use. Today counts in `spent_pico` only, since it goes on.
    """
    today = now.astimezone(UTC).date()
    left = _month_end(today) - now
    used = [day for day, amount in days.items() if amount and day < today]
    if not used:
        return None
    ends = []
    for window in WINDOWS:
        first = max(today - window * DAY, min(used))
        amount = sum(pico for day, pico in days.items() if first <= day < today)
        ends.append(spent_pico + amount * (left // _TICK) // ((today - first).days * (DAY // _TICK)))
    return SpendForecast(min(ends), max(ends))


def _month_end(day: date) -> datetime:
    following = (day.replace(day=1) + 31 * DAY).replace(day=1)
    return datetime.combine(following, time(), UTC)
