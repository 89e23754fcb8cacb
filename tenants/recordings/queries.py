"""Reads the data policy of a tenant, and its recorded requests."""

from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import DataPolicy, RecordedRequest
from loraplex.tenants.recordings.records import DataPolicyDocument, RecordRequests

BATCH: Final = 100
"""Rows in memory at once: each may be some hundred KiB."""
MAX_READ_BYTES: Final = 64 << 20
"""Of encrypted contents, for one suite."""


class FoundRequest(NamedTuple):
    """A recorded request. `content` is encrypted for `id`."""

    id: UUID
    base_digest: str
    content: bytes


async def data_policy(session: AsyncSession, tenant_id: UUID) -> DataPolicyDocument:
    """Return the policy of a tenant; without one, nothing is recorded."""
    row = await session.get(DataPolicy, tenant_id)
    count = select(func.count()).where(RecordedRequest.tenant_id == tenant_id)
    recorded = await session.scalar(count) or 0
    if row is None:
        return DataPolicyDocument(record_requests=None, recorded=recorded)
    return DataPolicyDocument(record_requests=rules_of(row), recorded=recorded, revision=row.revision)


def rules_of(row: DataPolicy) -> RecordRequests | None:
    """Return how the tenant of a row has its requests recorded; None for not at all."""
    return None if row.record_requests is None else RecordRequests.model_validate(row.record_requests)


async def recorded_requests(
    session: AsyncSession, tenant_id: UUID, adapter: str | None, limit: int
) -> list[FoundRequest]:
    """Return the newest recorded requests of a tenant, of one adapter if it is named, as many as have `MAX_READ_BYTES` together."""
    query = select(RecordedRequest.id, RecordedRequest.base_digest, RecordedRequest.content).where(
        RecordedRequest.tenant_id == tenant_id, RecordedRequest.expires_at > func.now()
    )
    if adapter is not None:
        query = query.where(RecordedRequest.adapter == adapter)
    newest = query.order_by(RecordedRequest.id.desc()).limit(limit).execution_options(yield_per=BATCH)
    found: list[FoundRequest] = []
    size = 0
    async for row in await session.stream(newest):
        size += len(row.content)
        if size > MAX_READ_BYTES:
            break
        found.append(FoundRequest(*row))
    return found
