"""Requests that may be repeated: the first answer is kept and given again, sealed by the platform.

Invariant: the record is written in the transaction of the change itself, so that there is one exactly where the change
took place; while that transaction runs, a lock of PostgreSQL turns others with the same key away.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import IdempotencyInUse, IdempotencyMismatch
from loraplex.tenants.models import IdempotencyRecord

KEPT: Final = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class RepeatableRequest:
    """What makes a request the same one: `caller` and `key` name it, `route` (method and path) and body are compared."""

    caller: str
    key: str
    route: str
    body_sha256: bytes
    tenant_id: UUID | None


class IdempotencyRepository:
    """The kept answers, seen by one session."""

    def __init__(self, session: AsyncSession, kept: timedelta = KEPT) -> None:
        """`kept`: how long answers are."""
        self._session = session
        self._kept = kept

    async def begin(self, request: RepeatableRequest) -> bytes | None:
        """The sealed answer of the same request, or None when it is the first: then `finish` it in this transaction.

        Raises `IdempotencyInUse` while the first is running, `IdempotencyMismatch` when another request had the key.
        """
        name = func.hashtextextended(f"idempotency:{request.caller}:{request.key}", 0)
        if not await self._session.scalar(select(func.pg_try_advisory_xact_lock(name))):
            raise IdempotencyInUse(
                "a request with this Idempotency-Key is running; try again when it has ended"
            )
        record = await self._session.get(IdempotencyRecord, (request.caller, request.key))
        if record is None:
            return None
        if record.expires_at <= datetime.now(UTC):
            await self._session.delete(record)
            await self._session.flush()
            return None
        if (record.route, record.body_sha256) != (request.route, request.body_sha256):
            raise IdempotencyMismatch("this Idempotency-Key was used for another request: take a new one")
        return record.sealed_answer

    async def finish(self, request: RepeatableRequest, status: int, sealed_answer: bytes) -> None:
        """Keeps the answer."""
        self._session.add(
            IdempotencyRecord(
                caller=request.caller,
                idempotency_key=request.key,
                tenant_id=request.tenant_id,
                route=request.route,
                body_sha256=request.body_sha256,
                status=status,
                sealed_answer=sealed_answer,
                expires_at=datetime.now(UTC) + self._kept,
            )
        )
        await self._session.flush()
