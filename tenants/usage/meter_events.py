"""Meter events: what each tenant used of each class of tokens in each closed hour, in the shape of Stripe's meter events.

Invariant: an event never changes once it is written. Rows that reach its hour later become a further event with the
difference, so the events of an hour always sum to its usage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import MeterExport

CLOSES_AFTER: Final = timedelta(minutes=5)
"""How long after its end an hour is closed. What is settled later is a further event of that hour."""
DAY: Final = timedelta(days=1)
WINDOW: Final = 34 * DAY
"""The age up to which hours are compared: Stripe takes no event of more than 35 days ago."""
BATCH: Final = 500
EVENT_NAME: Final = "loraplex_{meter}_tokens"

ALONE: Final = text("SELECT pg_try_advisory_xact_lock(hashtextextended('loraplex meter export', 0))")
# Tenant by tenant, along the key of the rollups.
COLLECT: Final = text("""
WITH used AS MATERIALIZED (
    SELECT t.id AS tenant_id, r.hour, m.meter, m.tokens FROM tenants t
    CROSS JOIN LATERAL (
        SELECT hour, sum(uncached_tokens) AS uncached, sum(cached_tokens) AS cached,
            sum(completion_tokens) AS completion, sum(reasoning_tokens) AS reasoning
        FROM usage_rollups WHERE tenant_id = t.id AND hour >= :since AND hour < :until GROUP BY hour
    ) r
    CROSS JOIN LATERAL (
        VALUES ('prompt', r.uncached), ('cached_prompt', r.cached), ('completion', r.completion - r.reasoning),
            ('reasoning', r.reasoning)
    ) m (meter, tokens)
), exported AS (
    SELECT tenant_id, hour, meter, sum(value) AS tokens, max(sequence) AS sequence FROM meter_exports
    WHERE hour >= :since AND hour < :until GROUP BY tenant_id, hour, meter
)
INSERT INTO meter_exports (tenant_id, hour, meter, sequence, value)
SELECT u.tenant_id, u.hour, u.meter, coalesce(e.sequence, 0) + 1, u.tokens - coalesce(e.tokens, 0)
FROM used u LEFT JOIN exported e ON (e.tenant_id, e.hour, e.meter) = (u.tenant_id, u.hour, u.meter)
WHERE u.tokens <> coalesce(e.tokens, 0) ORDER BY u.hour, u.tenant_id, u.meter
""")


class MeterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event. `identifier` follows from tenant, hour, class and sequence; `timestamp` is the begin of the hour, in seconds
    since 1970; `payload` is `{"tenant_id", "value"}`, the value as a decimal string that may be negative.
    """

    event_name: str
    identifier: str
    timestamp: int
    payload: dict[str, str]


@dataclass(frozen=True, slots=True)
class UnsentEvents:
    """The oldest events that were not sent, at most `BATCH`, with the ids of their rows."""

    ids: Sequence[int]
    events: Sequence[MeterEvent]


def last_closed(now: datetime) -> datetime:
    """The end of the last hour that is closed at `now`."""
    return (now.astimezone(UTC) - CLOSES_AFTER).replace(minute=0, second=0, microsecond=0)


def closed_days(now: datetime) -> list[tuple[datetime, datetime]]:
    """The closed hours of `WINDOW` at `now`, as spans of a day, the oldest first: one statement for each stays short."""
    until = last_closed(now)
    begins = (until - WINDOW + number * DAY for number in range(WINDOW // DAY))
    return [(begin, begin + DAY) for begin in begins]


class MeterExports:
    """The exported meter events, seen by one session of an operator."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def lock(self) -> bool:
        """Whether this transaction may export; False while another one does."""
        return bool(await self._session.scalar(ALONE))

    async def collect(self, since: datetime, until: datetime) -> int:
        """Write the events of hours from `since` to before `until` that were not written yet, and return their number.

        Call under `lock`, for closed hours.
        """
        result: Any = await self._session.execute(COLLECT, {"since": since, "until": until})
        return int(result.rowcount)

    async def unsent(self) -> UnsentEvents:
        """The next events to send. Call under `lock`."""
        query = select(MeterExport).where(MeterExport.sent_at.is_(None)).order_by(MeterExport.id).limit(BATCH)
        rows = (await self._session.scalars(query)).all()
        return UnsentEvents([row.id for row in rows], [*map(meter_event, rows)])

    async def sent(self, ids: Sequence[int]) -> None:
        """Record that these were sent. Call in the transaction of `unsent`."""
        statement = update(MeterExport).where(MeterExport.id.in_(ids)).values(sent_at=func.now())
        await self._session.execute(statement.execution_options(synchronize_session=False))

    async def oldest_s(self) -> float:
        """The age in seconds of the oldest event that was not sent; 0 if all were."""
        age = func.extract("epoch", func.now() - func.min(MeterExport.created_at))
        return float(await self._session.scalar(select(age).where(MeterExport.sent_at.is_(None))) or 0)


def meter_event(row: MeterExport) -> MeterEvent:
    return MeterEvent(
        event_name=EVENT_NAME.format(meter=row.meter),
        identifier=identifier(row.tenant_id, row.hour, row.meter, row.sequence),
        timestamp=int(row.hour.timestamp()),
        payload={"tenant_id": str(row.tenant_id), "value": str(row.value)},
    )


def identifier(tenant_id: UUID, hour: datetime, meter: str, sequence: int) -> str:
    """The identifier of an event, at most 100 characters: Stripe takes no longer one."""
    return f"lpx-{tenant_id}-{hour.astimezone(UTC):%Y%m%dT%H}-{meter}-{sequence}"
