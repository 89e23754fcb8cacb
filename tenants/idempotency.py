"""Idempotency: stores the first response to a request, encrypted by the platform, and returns it again.

Invariant: the record is written in the transaction of the change, so a record exists exactly if the change was made. While
that transaction runs, a lock of PostgreSQL refuses other requests with the same key.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import IdempotencyInUse, IdempotencyMismatch
from loraplex.tenants.models import IdempotencyRecord


@dataclass(frozen=True, slots=True)
class RepeatableRequest:
    """The identity of a request: `caller` and `key` name it; `route` (method and path) and body must be equal."""

    caller: str
    key: str
    route: str
    body_sha256: bytes
    tenant_id: UUID | None


async def stored_answer(session: AsyncSession, request: RepeatableRequest) -> bytes | None:
    """The encrypted response of the same request; None if it is the first: then call `store_answer` in this transaction.

    Raises `IdempotencyInUse` while the first is running, `IdempotencyMismatch` when another request had the key.
    """
    name = func.hashtextextended(f"idempotency:{request.caller}:{request.key}", 0)
    if not await session.scalar(select(func.pg_try_advisory_xact_lock(name))):
        raise IdempotencyInUse("a request with this Idempotency-Key is running; try again when it has ended")
    record = await session.get(IdempotencyRecord, (request.caller, request.key))
    if record is None:
        return None
    if record.expires_at <= datetime.now(UTC):
        await session.delete(record)
        await session.flush()
        return None
    if (record.route, record.body_sha256) != (request.route, request.body_sha256):
        raise IdempotencyMismatch("this Idempotency-Key was used for another request: take a new one")
    return record.sealed_answer


async def store_answer(
    session: AsyncSession, request: RepeatableRequest, status: int, sealed_answer: bytes, lifetime: timedelta
) -> None:
    """Store the encrypted response for `lifetime`."""
    record = IdempotencyRecord(
        caller=request.caller,
        idempotency_key=request.key,
        tenant_id=request.tenant_id,
        route=request.route,
        body_sha256=request.body_sha256,
        status=status,
        sealed_answer=sealed_answer,
        expires_at=datetime.now(UTC) + lifetime,
    )
    session.add(record)
    await session.flush()
