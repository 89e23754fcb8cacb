"""Billing months. Invariant: a month begins and ends at midnight UTC, whatever the zone of the reader."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import InvalidField

CLOCK_SKEW: Final = timedelta(days=1)
"""The most by which a gateway's clock counts as wrong: one that started in 1970 delays no month for ever."""
# The last second of a month of a gateway whose clock is behind comes when PostgreSQL's month is over.
_PASSED_EVERYWHERE: Final = text(
    "SELECT clock_timestamp() - make_interval(secs => least(coalesce(max(skew_ms), 0) / 1000.0, :most_s)) FROM gateways"
)
_MONTH: Final = re.compile(r"(20[0-9]{2})-(0[1-9]|1[0-2])", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Month:
    """A calendar month of UTC, from 2000-01 to 2099-12."""

    year: int
    month: int

    @classmethod
    def parse(cls, text: str) -> "Month":
        """Read `YYYY-MM`. Raises `InvalidField`."""
        match = _MONTH.fullmatch(text)
        if match is None:
            raise InvalidField("month", "month must be YYYY-MM, from 2000-01 to 2099-12")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of(cls, time: datetime) -> "Month":
        """Return the month of a time with a zone."""
        utc = time.astimezone(UTC)
        return cls(utc.year, utc.month)

    @property
    def begin(self) -> datetime:
        """The first moment of the month."""
        return datetime(self.year, self.month, 1, tzinfo=UTC)

    @property
    def end(self) -> datetime:
        """The first moment after the month."""
        return (self.begin + timedelta(days=31)).replace(day=1)

    @property
    def previous(self) -> "Month":
        return Month.of(self.begin - timedelta(days=1))

    def __str__(self) -> str:
        return f"{self.year}-{self.month:02}"


async def passed_everywhere(session: AsyncSession) -> datetime:
    """Return PostgreSQL's time less the largest skew of a gateway's clock, at most `CLOCK_SKEW`, in a session of an operator.

    What ended before that has ended for all gateways.
    """
    most = {"most_s": CLOCK_SKEW.total_seconds()}
    time: datetime = (await session.execute(_PASSED_EVERYWHERE, most)).scalar_one()
    return time
