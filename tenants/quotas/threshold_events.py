"""Events of crossed thresholds: 80 and 100 percent of a budget per day or month. Invariant: each is recorded once."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import Adapter, ApiKey, QuotaEvent

Event = tuple[QuotaEvent, str | None, str | None]
"""An event, with the public id of its key or the name of its adapter, if it has one."""


async def quota_events(
    session: AsyncSession, tenant_id: UUID, after: tuple[datetime, UUID] | None, limit: int
) -> Sequence[Event]:
    """A tenant's events after `after`, newest first."""
    query = (
        select(QuotaEvent, ApiKey.key_id, Adapter.name)
        .outerjoin(ApiKey, (QuotaEvent.level == "key") & (ApiKey.id == QuotaEvent.subject_id))
        .outerjoin(Adapter, (QuotaEvent.level == "adapter") & (Adapter.id == QuotaEvent.subject_id))
        .where(QuotaEvent.tenant_id == tenant_id)
        .order_by(QuotaEvent.created_at.desc(), QuotaEvent.id.desc())
        .limit(limit)
    )
    if after is not None:
        query = query.where(tuple_(QuotaEvent.created_at, QuotaEvent.id) < after)
    return [(event, key_id, name) for event, key_id, name in await session.execute(query)]
