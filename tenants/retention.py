"""How long records are kept that nobody needs for ever. Invariant: one transaction deletes a bounded number of rows, and of
several gateways that would do so at once one does.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, delete, inspect, select, text, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import AuditEntry, Base, IdempotencyRecord, QuotaEvent

MIN_AUDIT_DAYS: Final = 2
"""The database itself refuses to delete what is younger than a day."""
ALONE: Final = text("SELECT pg_try_advisory_xact_lock(hashtextextended('loraplex retention', 0))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Times are counted from when a record was written. Idempotency records carry their own end."""

    audit: timedelta
    quota_events: timedelta


class RetentionRepository:
    """Deletes what is old, seen by one session of an operator."""

    def __init__(self, session: AsyncSession, retention: Retention, now: datetime | None = None) -> None:
        self._session = session
        self._retention = retention
        self._now = now or datetime.now(UTC)

    async def sweep(self, batch: int) -> dict[str, int]:
        """Deletes at most `batch` old rows of each table: how many of which. A full batch says that more may be left.

        Deletes nothing while another transaction does the same.
        """
        if not await self._session.scalar(ALONE):
            return {table.__tablename__: 0 for table, _ in self._conditions()}
        return {
            table.__tablename__: await self._delete(table, old, batch) for table, old in self._conditions()
        }

    def _conditions(self) -> list[tuple[type[Base], ColumnElement[bool]]]:
        audit, events = self._now - self._retention.audit, self._now - self._retention.quota_events
        # Ids of audit entries sort by time: the bound on them keeps the query to the oldest entries of the index.
        written = (AuditEntry.id < first_id_at(audit)) & (AuditEntry.at < audit)
        return [
            (AuditEntry, written),
            (QuotaEvent, QuotaEvent.created_at < events),
            (IdempotencyRecord, IdempotencyRecord.expires_at < self._now),
        ]

    async def _delete(self, table: type[Base], old: ColumnElement[bool], batch: int) -> int:
        columns = inspect(table).primary_key
        some = select(*columns).where(old).limit(batch)
        statement = delete(table).where(tuple_(*columns).in_(some))
        result: Any = await self._session.execute(statement.execution_options(synchronize_session=False))
        return int(result.rowcount)


def first_id_at(time: datetime) -> UUID:
    """The least UUIDv7 of a time (RFC 9562, section 5.7)."""
    milliseconds = int(time.timestamp() * 1000)
    return UUID(int=(milliseconds << 80) | (7 << 76) | (2 << 62))
