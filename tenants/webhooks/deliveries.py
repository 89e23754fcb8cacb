"""Deliveries of events to endpoints, across tenants. Invariant: an attempt is counted before it is made, and its result counts
only while no other attempt has begun, so a gateway that dies or is late never undoes a later result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import BigInteger, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY, INTERVAL
from sqlalchemy.dialects.postgresql import UUID as UuidType
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.webhooks.records import MAX_ATTEMPTS

MAX_AGE: Final = timedelta(days=5)
"""So long after its event or replay, or after `MAX_ATTEMPTS`, a delivery is given up."""
LEASE: Final = timedelta(seconds=120)
"""The time in which no other gateway attempts a delivery; several times what an attempt takes."""
BATCH: Final = 500
"""Most events dispatched, and deliveries given up, in one transaction."""

# An event reaches the endpoints that exist when it is dispatched. Their rows are locked, so that none is deleted meanwhile.
DISPATCH: Final = text("""
WITH taken AS MATERIALIZED (
    SELECT id, tenant_id, type FROM outbox_events WHERE dispatched_at IS NULL
    ORDER BY created_at LIMIT :batch FOR UPDATE SKIP LOCKED
), receivers AS MATERIALIZED (
    SELECT id, tenant_id, events FROM webhook_endpoints
    WHERE tenant_id IN (SELECT tenant_id FROM taken) FOR KEY SHARE
), added AS (
    INSERT INTO webhook_deliveries (tenant_id, event_id, endpoint_id, attempts_left, expires_at)
    SELECT t.tenant_id, t.id, r.id, :attempts, now() + :age
    FROM taken t JOIN receivers r ON r.tenant_id = t.tenant_id AND t.type = ANY (r.events)
)
UPDATE outbox_events e SET dispatched_at = now() FROM taken t WHERE e.id = t.id
""").bindparams(bindparam("age", type_=INTERVAL))

GIVE_UP: Final = text("""
UPDATE webhook_deliveries SET state = 'dead', ended_at = now(), last_error = coalesce(last_error, 'interrupted')
WHERE id IN (
    SELECT id FROM webhook_deliveries
    WHERE state = 'pending' AND due_at <= now() AND (attempts_left = 0 OR expires_at <= now())
    LIMIT :batch FOR UPDATE SKIP LOCKED
)
""")

# Tenants in random order, so that none is always last when there are more deliveries than slots.
CLAIM: Final = text("""
WITH due AS MATERIALIZED (
    SELECT d.id FROM (
        SELECT t.id AS tenant_id, :per_tenant - coalesce(r.running, 0) AS free
        FROM tenants t LEFT JOIN unnest(:tenants, :running) AS r (tenant_id, running) ON r.tenant_id = t.id
        WHERE t.deleted_at IS NULL AND t.id IN (SELECT tenant_id FROM webhook_endpoints)
        ORDER BY random()
    ) t CROSS JOIN LATERAL (
        SELECT id FROM webhook_deliveries
        WHERE tenant_id = t.tenant_id AND state = 'pending' AND due_at <= now()
            AND attempts_left > 0 AND expires_at > now()
        ORDER BY due_at LIMIT greatest(t.free, 0) FOR UPDATE SKIP LOCKED
    ) d LIMIT :slots
)
UPDATE webhook_deliveries d
SET attempts = d.attempts + 1, attempts_left = d.attempts_left - 1, last_attempt_at = now(), due_at = now() + :lease
FROM due, outbox_events e, webhook_endpoints w
WHERE d.id = due.id AND e.id = d.event_id AND w.id = d.endpoint_id
RETURNING d.id AS delivery_id, d.tenant_id, d.attempts, d.attempts_left, d.expires_at, d.event_id, e.type, e.data,
    e.created_at, d.endpoint_id, w.url, w.sealed_secret AS encrypted_secret,
    CASE WHEN w.previous_until > now() THEN w.previous_secret END AS previous_secret
""").bindparams(
    bindparam("tenants", type_=ARRAY(UuidType)),
    bindparam("running", type_=ARRAY(BigInteger)),
    bindparam("lease", type_=INTERVAL),
)

FINISH: Final = text("""
UPDATE webhook_deliveries SET last_status = :status, last_error = :error,
    state = CASE WHEN cast(:error AS text) IS NULL THEN 'delivered'
        WHEN attempts_left = 0 OR now() + :delay >= expires_at THEN 'dead' ELSE 'pending' END,
    ended_at = CASE WHEN cast(:error AS text) IS NULL OR attempts_left = 0 OR now() + :delay >= expires_at THEN now() END,
    due_at = now() + :delay
WHERE id = :delivery_id AND state = 'pending' AND attempts = :attempts
RETURNING state
""").bindparams(bindparam("delay", type_=INTERVAL))

OLDEST: Final = text("""
SELECT coalesce(extract(epoch FROM now() - least(
    (SELECT min(created_at) FROM outbox_events WHERE dispatched_at IS NULL),
    (SELECT min(due_at) FROM webhook_deliveries WHERE state = 'pending' AND due_at <= now())
)), 0)::double precision
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt, claimed by this gateway until the end of its lease. `attempts` counts it too."""

    delivery_id: UUID
    tenant_id: UUID
    attempts: int
    attempts_left: int
    expires_at: datetime
    event_id: UUID
    type: str
    data: dict[str, Any]
    created_at: datetime
    endpoint_id: UUID
    url: str
    encrypted_secret: bytes = field(repr=False)
    previous_secret: bytes | None = field(repr=False)


class Deliveries:
    """The deliveries of all tenants, seen by one session of an operator."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def dispatch(self) -> int:
        """Create the deliveries of new events, and return the number of events: `BATCH` means that more may be left."""
        result: Any = await self._session.execute(
            DISPATCH, {"batch": BATCH, "attempts": MAX_ATTEMPTS, "age": MAX_AGE}
        )
        return int(result.rowcount)

    async def give_up(self) -> int:
        """End deliveries that are too old, or whose last attempt was interrupted. Returns their number."""
        result: Any = await self._session.execute(GIVE_UP, {"batch": BATCH})
        return int(result.rowcount)

    async def claim(self, slots: int, per_tenant: int, running: Mapping[UUID, int]) -> list[Attempt]:
        """Begin at most `slots` attempts, so that no tenant has more than `per_tenant` with those in `running`."""
        rows = await self._session.execute(
            CLAIM,
            {
                "slots": slots,
                "per_tenant": per_tenant,
                "tenants": [*running],
                "running": [*running.values()],
                "lease": LEASE,
            },
        )
        return [Attempt(**row._mapping) for row in rows]

    async def finish(
        self, attempt: Attempt, status: int | None, error: str | None, delay: timedelta
    ) -> str | None:
        """Record the result of an attempt; `error` None: received. Returns the state then: after an error `pending`, to be
        repeated after `delay`, or `dead`. None: the lease had ended and another attempt counts.
        """
        state: str | None = await self._session.scalar(
            FINISH,
            {
                "delivery_id": attempt.delivery_id,
                "attempts": attempt.attempts,
                "status": status,
                "error": error,
                "delay": delay,
            },
        )
        return state

    async def oldest_s(self) -> float:
        """The age in seconds of the oldest event or due delivery that waits; 0 when none does."""
        return float(await self._session.scalar(OLDEST) or 0.0)
