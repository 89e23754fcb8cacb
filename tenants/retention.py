"""Deletes records after their retention time. Invariant: one transaction deletes a bounded number of rows, and only one of
several gateways deletes at a time.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, func, inspect, select, text, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.models import (
    ApiKey,
    AuditEntry,
    Base,
    EngineMinuteRow,
    Evaluation,
    FailedRequest,
    IdempotencyRecord,
    Invitation,
    Membership,
    MeterExport,
    OneTimeLink,
    OutboxEvent,
    QuotaEvent,
    RecordedRequest,
    SignInThrottle,
    UsageRollup,
    User,
    UserSession,
)

FAILED_REQUESTS: Final = timedelta(days=1)
"""As long as explanations of denials are kept."""
MAX_FAILED_REQUESTS: Final = 10_000
"""The rows of a tenant: at the most of one gateway, those of three hours."""
WEBHOOK_EVENTS: Final = timedelta(days=30)
"""The time for which events and their deliveries are kept, from the writing of the event."""
METER_EVENTS: Final = timedelta(days=60)
"""The time for which exported meter events are kept, from their hour; longer than hours are compared."""
PEOPLE: Final = timedelta(days=30)
"""The time for which links, invitations and known networks are kept after their end, and people without any right."""
ENGINE_MINUTES: Final = timedelta(days=7)
CONSOLE_KEYS: Final = timedelta(days=1)
"""The time for which keys of the console's pages are kept after their end, unless requests used them: usage names those."""
ALONE: Final = text("SELECT pg_try_advisory_xact_lock(hashtextextended('loraplex retention', 0))")
# The oldest beyond the bound. One read of the index for each tenant, which the planner cannot repeat for each row.
DISPLACED: Final = text("""
WITH bounds AS MATERIALIZED (
    SELECT t.id AS tenant_id, b.id FROM tenants t CROSS JOIN LATERAL (
        SELECT f.id FROM failed_requests f WHERE f.tenant_id = t.id ORDER BY f.id DESC OFFSET :kept LIMIT 1
    ) b
)
DELETE FROM failed_requests WHERE (tenant_id, id) IN (
    SELECT f.tenant_id, f.id FROM bounds b JOIN failed_requests f ON f.tenant_id = b.tenant_id AND f.id <= b.id LIMIT :batch
)
""")
# Before keys are deleted: what names one of them names the next key of the row that stays. So no row grows with each rotation.
RELINK: Final = tuple(
    text(f"""
WITH RECURSIVE linked (id, next) AS (
    SELECT k.id, e.{column} FROM api_keys k JOIN api_keys e ON e.id = k.{column}
    WHERE e.id = ANY(:ended) AND k.id <> ALL(:ended)
    UNION ALL SELECT l.id, e.{column} FROM linked l JOIN api_keys e ON e.id = l.next WHERE e.id = ANY(:ended)
) UPDATE api_keys k SET {column} = l.next FROM linked l
WHERE k.id = l.id AND (l.next IS NULL OR l.next <> ALL(:ended))
""")
    for column in ("parent_id", "replaced_by")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Retention times, from the writing of a record. Idempotency records carry their own end.

    A key stays for `audit` after its end, because the audit log names keys by their public ids, and as long as a key that it
    replaced is live, its limits bind one below it, or its use of the month counts for its group.
    """

    audit: timedelta
    quota_events: timedelta = timedelta(days=400)


class RetentionRepository:
    """Deletes old records in one session of an operator."""

    def __init__(self, session: AsyncSession, retention: Retention, now: datetime | None = None) -> None:
        self._session = session
        self._retention = retention
        self._now = now or datetime.now(UTC)

    async def sweep(self, batch: int) -> dict[str, int]:
        """Delete at most `batch` old rows per table, and as many failed requests beyond their bound. Return the numbers by table.
        A full batch means that more may be left.

        Deletes nothing while another transaction sweeps.
        """
        if not await self._session.scalar(ALONE):
            return {table.__tablename__: 0 for table, _ in self._conditions()}
        deleted = {
            table.__tablename__: await self._delete(table, old, batch) for table, old in self._conditions()
        }
        displaced: Any = await self._session.execute(DISPLACED, {"kept": MAX_FAILED_REQUESTS, "batch": batch})
        deleted[FailedRequest.__tablename__] += int(displaced.rowcount)
        return deleted

    def _conditions(self) -> list[tuple[type[Base], ColumnElement[bool]]]:
        audit, events = self._now - self._retention.audit, self._now - self._retention.quota_events
        # Ids of audit entries sort by time: the bound on them keeps the query to the oldest entries of the index.
        written = (AuditEntry.id < uuid7_from(audit)) & (AuditEntry.at < audit)
        ended = (ApiKey.kind == "console") & (ended_at(ApiKey) < self._now - CONSOLE_KEYS)
        # `last_used_at` is written with a delay, and lost with its gateway: usage tells for certain.
        unused_console_keys = ended & ApiKey.last_used_at.is_(None) & ~_has_usage()
        return [
            (AuditEntry, written),
            (QuotaEvent, QuotaEvent.created_at < events),
            (Evaluation, Evaluation.ended_at < events),
            (OutboxEvent, OutboxEvent.created_at < self._now - WEBHOOK_EVENTS),
            (EngineMinuteRow, EngineMinuteRow.minute < self._now - ENGINE_MINUTES),
            (MeterExport, MeterExport.sent_at.is_not(None) & (MeterExport.hour < self._now - METER_EVENTS)),
            (IdempotencyRecord, IdempotencyRecord.expires_at < self._now),
            (RecordedRequest, RecordedRequest.expires_at < self._now),
            (FailedRequest, FailedRequest.at < self._now - FAILED_REQUESTS),
            (
                ApiKey,
                (ended_at(ApiKey) < audit) & ~self._has_live_predecessor() & ~self._is_of_group()
                | unused_console_keys,
            ),
            *self._of_people(),
        ]

    def _of_people(self) -> list[tuple[type[Base], ColumnElement[bool]]]:
        old = self._now - PEOPLE
        is_member = select(Membership.user_id).where(Membership.user_id == User.id).exists()
        last_seen = func.coalesce(User.last_seen_at, User.created_at)
        return [
            (UserSession, UserSession.expires_at < self._now),
            (OneTimeLink, OneTimeLink.expires_at < old),
            (Invitation, Invitation.expires_at < old),
            (SignInThrottle, SignInThrottle.updated_at < old),
            (User, ~User.is_operator & ~is_member & (last_seen < old)),
        ]

    def _has_live_predecessor(self) -> ColumnElement[bool]:
        """Whether a live key was replaced by this one: without its successor it would count as not replaced."""
        predecessor = aliased(ApiKey)
        end = ended_at(predecessor)
        found = select(predecessor.id).where(predecessor.replaced_by == ApiKey.id)
        return found.where(end.is_(None) | (end > self._now)).exists()

    def _is_of_group(self) -> ColumnElement[bool]:
        """Whether limits of this key bind others, or it used a group's limits in this month, which its usage counts again."""
        other, month = aliased(ApiKey), self._now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        bound = select(other.id).where(other.limit_root == ApiKey.id, other.id != ApiKey.id)
        return bound.exists() | (ApiKey.limit_root != ApiKey.id) & (ended_at(ApiKey) >= month)

    async def _delete(self, table: type[Base], old: ColumnElement[bool], batch: int) -> int:
        columns = inspect(table).primary_key
        if table is ApiKey:
            ended = [*await self._session.scalars(select(ApiKey.id).where(old).limit(batch))]
            for relink in RELINK:
                await self._session.execute(relink, {"ended": ended})
            old = ApiKey.id.in_(ended)
        some = select(*columns).where(old).limit(batch)
        statement = delete(table).where(tuple_(*columns).in_(some))
        result: Any = await self._session.execute(statement.execution_options(synchronize_session=False))
        return int(result.rowcount)


def _has_usage() -> ColumnElement[bool]:
    # No gateway's clock is behind by a day.
    since = UsageRollup.hour >= ApiKey.created_at - timedelta(days=1)
    of_tenant = (UsageRollup.tenant_id == ApiKey.tenant_id) & since
    return select(UsageRollup.hour).where(of_tenant, UsageRollup.api_key_id == ApiKey.id).exists()


def ended_at(key: type[ApiKey]) -> ColumnElement[datetime | None]:
    """When a key was revoked or expires, whichever is earlier; null for one that does neither."""
    return func.least(key.revoked_at, key.expires_at)
