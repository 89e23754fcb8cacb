"""The days and months that budgets are counted in, in UTC. Invariant: a period's name is in the name of its counters, so
that a new period starts at zero without a reset.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

DAY_FORMAT = "d:%Y-%m-%d"
MONTH_FORMAT = "m:%Y-%m"


@dataclass(frozen=True, slots=True)
class Periods:
    """The day `d:YYYY-MM-DD` and the month `m:YYYY-MM` of one moment."""

    day: str
    month: str


def periods_of(time: datetime) -> Periods:
    """`time` must have a zone; the periods are those of UTC."""
    utc = time.astimezone(UTC)
    return Periods(f"d:{utc.date().isoformat()}", f"m:{utc.date().isoformat()[:7]}")


def period_start(period: str) -> datetime:
    form = DAY_FORMAT if period.startswith("d:") else MONTH_FORMAT
    return datetime.strptime(period, form).replace(tzinfo=UTC)


def period_end(period: str) -> datetime:
    """The first moment after the period."""
    start = period_start(period)
    if period.startswith("d:"):
        return start + timedelta(days=1)
    return (start + timedelta(days=31)).replace(day=1)


def periods_around(time: datetime) -> tuple[str, ...]:
    """The previous, current and next day and month, since the counters' clock may be on the other side of a boundary."""
    now = periods_of(time)
    names = []
    for period in (now.day, now.month):
        before = period_start(period) - timedelta(microseconds=1)
        neighbours = (periods_of(before), now, periods_of(period_end(period)))
        names += [each.day if period == now.day else each.month for each in neighbours]
    return tuple(names)
