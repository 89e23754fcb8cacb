"""Partitions of the ledger (one per month, UTC) and of request phases (one per day): made ahead, dropped after their retention.

Invariant: one partition per transaction and gateway at a time, which waits at most `LOCK_SECONDS` for each lock; so no
writer waits longer for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, LiteralString

import psycopg
import structlog

from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.ledger.writer_connection import WriterConnection
from loraplex.tenants.periods import period_end, periods_of

LEDGER: Final = "usage_records"
PHASES: Final = "request_phases"
MONTHS_AHEAD: Final = 2
DAYS_AHEAD: Final = 7
LOCK_SECONDS: Final = 0.05
ALONE: Final = "pg_try_advisory_xact_lock(hashtextextended('loraplex partitions', 0))"
ADD: Final = f"SELECT CASE WHEN {ALONE} THEN add_usage_partition(%s, %s) END"
DROP: Final = f"SELECT CASE WHEN {ALONE} THEN drop_usage_partition(%s, %s) END"
LOG = structlog.get_logger("loraplex.partitions")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRetention:
    """Whole months of the ledger before the current one that are kept, at least 2, and days of request phases, at least 1."""

    ledger_months: int = 24
    phases_days: int = 14


class LedgerPartitions:
    """Makes and drops partitions as an operator. A busy table is left to the next call."""

    def __init__(self, database_url: str, retention: LedgerRetention) -> None:
        self._retention = retention
        # A statement is a transaction: no lock waits for this process.
        self._connection = WriterConnection(
            database_url, durable=True, role="app_operator", lock_s=LOCK_SECONDS
        )

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
            name = await self._run(ADD, parent, at)
            made += [] if name is None else [name]
        await self.close()
        return dropped, made

    async def add_month(self, at: datetime) -> None:
        """Make the ledger's partition of a month that may be over. Raises `DatabaseUnavailable`."""
        await self._run(ADD, LEDGER, at)
        await self.close()

    async def drop_oldest(self, parent: str, keep: int) -> str | None:
        """Drop the oldest partition that is older than `keep` months or days; return its name, None if there is none or the
        table is busy. Raises `DatabaseUnavailable`.
        """
        return await self._run(DROP, parent, keep)

    async def close(self) -> None:
        await self._connection.close()

    async def _run(self, statement: LiteralString, parent: str, value: object) -> str | None:
        """Change one partition; return its name, None where there was nothing to change or it must wait."""
        try:
            [(name,)] = await self._connection.fetch(statement, parent, value)
        except psycopg.errors.CheckViolation:
            reason = "the default partition has its rows already, and they stay there"
        except DatabaseUnavailable as error:
            if not isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                raise
            reason = "its table is busy"
        else:
            return None if name is None else str(name)
        LOG.warning("a partition is left as it is", table=parent, about=str(value), reason=reason)
        return None


def _ahead(now: datetime) -> Iterator[tuple[str, datetime]]:
    """A moment of each partition that is needed at `now` and soon."""
    month = now
    for _ in range(MONTHS_AHEAD + 1):
        yield LEDGER, month
        month = period_end(periods_of(month).month)
    for days in range(DAYS_AHEAD + 1):
        yield PHASES, now + timedelta(days=days)
