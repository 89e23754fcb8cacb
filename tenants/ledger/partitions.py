"""Partitions of the ledger (one per month, UTC) and of request phases (one per day): made ahead, dropped after their retention.

Invariant: one partition per transaction and gateway at a time, which waits at most `LOCK_MS` for each lock; so no writer waits
longer for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import psycopg
import structlog
from sqlalchemy import TextClause, text
from sqlalchemy.exc import DBAPIError

from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.quotas.periods import period_end, periods_of

LEDGER: Final = "usage_records"
PHASES: Final = "request_phases"
MONTHS_AHEAD: Final = 2
DAYS_AHEAD: Final = 7
LOCK_MS: Final = 50
ALONE: Final = text("SELECT pg_try_advisory_xact_lock(hashtextextended('loraplex partitions', 0))")
SHORT_LOCKS: Final = text("SELECT set_config('lock_timeout', :timeout, true)")
ADD: Final = text("SELECT add_usage_partition(:parent, CAST(:at AS timestamptz))")
DROP: Final = text("SELECT drop_usage_partition(:parent, :keep)")
REASONS: Final[dict[type[object], str]] = {
    psycopg.errors.LockNotAvailable: "its table is busy",
    psycopg.errors.CheckViolation: "the default partition has its rows already, and they stay there",
}
LOG = structlog.get_logger("loraplex.partitions")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRetention:
    """Whole months of the ledger before the current one that are kept, at least 2, and days of request phases, at least 1."""

    ledger_months: int = 24
    phases_days: int = 14


class LedgerPartitions:
    """Makes and drops partitions as an operator. A busy table is left to the next call."""

    def __init__(self, database: Database, retention: LedgerRetention) -> None:
        self._database = database
        self._retention = retention

    async def keep_up(self, now: datetime | None = None) -> tuple[list[str], list[str]]:
        """Drop what is older than its retention and make what is missing from `now` on. Return the names dropped and made.

        Raises `DatabaseUnavailable` when PostgreSQL cannot serve.
        """
        dropped = []
        for parent, keep in (
            (LEDGER, self._retention.ledger_months),
            (PHASES, self._retention.phases_days),
        ):
            while (name := await self.drop_oldest(parent, keep)) is not None:
                dropped.append(name)
        made = []
        for parent, at in _ahead(now or datetime.now(UTC)):
            name = await self._run(ADD, parent=parent, at=at)
            made += [] if name is None else [name]
        return dropped, made

    async def drop_oldest(self, parent: str, keep: int) -> str | None:
        """Drop the oldest partition that is older than `keep` months or days; return its name, None if there is none or the
        table is busy. Raises `DatabaseUnavailable`.
        """
        return await self._run(DROP, parent=parent, keep=keep)

    async def _run(self, statement: TextClause, **parameters: object) -> str | None:
        """Change one partition; return its name, None where there was nothing to change or it must wait."""
        try:
            async with self._database.as_operator() as session:
                if not await session.scalar(ALONE):
                    return None
                await session.execute(SHORT_LOCKS, {"timeout": f"{LOCK_MS}ms"})
                name: str | None = await session.scalar(statement, parameters)
                return name
        except (DBAPIError, DatabaseUnavailable) as error:
            cause = error if isinstance(error, DBAPIError) else error.__cause__
            reason = None if not isinstance(cause, DBAPIError) else REASONS.get(type(cause.orig))
            if reason is None:
                raise
            LOG.warning("a partition is left as it is", reason=reason, **parameters)
            return None


def _ahead(now: datetime) -> Iterator[tuple[str, datetime]]:
    """A moment of each partition that is needed at `now` and soon."""
    month = now
    for _ in range(MONTHS_AHEAD + 1):
        yield LEDGER, month
        month = period_end(periods_of(month).month)
    for days in range(DAYS_AHEAD + 1):
        yield PHASES, now + timedelta(days=days)
