"""Changes what a tenant lets be kept of its requests, and keeps what its gateways have recorded.

Invariant: a recorded request is written while its policy is locked, so that none outlives the end of the recording.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from uuid import UUID

from sqlalchemy import delete, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import DataPolicy, RecordedRequest
from loraplex.tenants.recordings import queries
from loraplex.tenants.recordings.records import (
    MAX_RECORDED_BYTES,
    DataPolicyDocument,
    NewRecording,
    RecordRequests,
)
from loraplex.tenants.unit_of_work import UnitOfWork, require_revision

TRIM = text("""
DELETE FROM recorded_requests WHERE id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER newest AS place, sum(octet_length(content)) OVER newest AS bytes
        FROM recorded_requests WHERE tenant_id = :tenant_id WINDOW newest AS (ORDER BY id DESC)
    ) AS kept WHERE place > :requests OR bytes > :bytes
)
""")


async def set_data_policy(
    uow: UnitOfWork, tenant_id: UUID, rules: RecordRequests | None, seen: int
) -> DataPolicyDocument:
    """Have requests recorded by `rules`, which apply to those that are kept, too; None deletes them. Raises `RevisionMoved`."""
    session = uow.session
    await session.execute(insert(DataPolicy).values(tenant_id=tenant_id).on_conflict_do_nothing())
    row = await session.get_one(DataPolicy, tenant_id, with_for_update=True, populate_existing=True)
    require_revision(seen, row.revision)
    before, after = row.record_requests, None if rules is None else rules.model_dump()
    if before != after:
        row.record_requests = after
        await session.flush()
        own = RecordedRequest.tenant_id == tenant_id
        if rules is None:
            await session.execute(delete(RecordedRequest).where(own))
        else:
            end = RecordedRequest.created_at + timedelta(days=rules.retention_days)
            await session.execute(update(RecordedRequest).where(own).values(expires_at=end))
            await _trim(session, tenant_id, rules)
        changes = [{"record_requests": each} for each in (before, after)]
        await uow.audit.record("data_policy.change", "data-policy", *changes, tenant_id=tenant_id)
    return await queries.data_policy(session, tenant_id)


async def recording_tenants(session: AsyncSession) -> Mapping[UUID, int]:
    """Return what percentage of their requests tenants have recorded, by tenant; those without are not in it."""
    rows = await session.scalars(select(DataPolicy).where(DataPolicy.record_requests.is_not(None)))
    return {row.tenant_id: rules.percent for row in rows if (rules := queries.rules_of(row)) is not None}


async def keep(session: AsyncSession, tenant_id: UUID, recordings: Sequence[NewRecording]) -> None:
    """Keep recorded requests of a tenant, in a session of an operator; none if its policy has ended."""
    row = await session.get(DataPolicy, tenant_id, with_for_update={"read": True})
    rules = None if row is None else queries.rules_of(row)
    if rules is None:
        return
    kept = timedelta(days=rules.retention_days)
    session.add_all(
        RecordedRequest(tenant_id=tenant_id, expires_at=each.created_at + kept, **each._asdict())
        for each in recordings
    )
    await session.flush()
    await _trim(session, tenant_id, rules)


async def _trim(session: AsyncSession, tenant_id: UUID, rules: RecordRequests) -> None:
    bounds = {"requests": rules.max_requests, "bytes": MAX_RECORDED_BYTES}
    await session.execute(TRIM, {"tenant_id": tenant_id, **bounds})
