"""Billing months. Invariant: a month begins and ends at midnight UTC, whatever the zone of the reader."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import InvalidField

# The last second of a month of a gateway whose clock is behind comes when PostgreSQL's month is over.
_PASSED_EVERYWHERE: Final = text(
    "SELECT clock_timestamp() - make_interval(secs => coalesce(max(skew_ms), 0) / 1000.0) FROM gateways"
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
    """Return PostgreSQL's time less the largest skew seen of a gateway's clock, in a session of an operator: what ended before that
    has ended for all of them.
    """
    time: datetime = (await session.execute(_PASSED_EVERYWHERE)).scalar_one()
    return time
