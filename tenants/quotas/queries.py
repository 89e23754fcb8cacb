"""Reads limits of tenants, keys and adapters as they are set, and events of crossed budgets."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.models import Adapter, ApiKey, QuotaEvent
from loraplex.tenants.pages import Part, sliced
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository
from loraplex.tenants.quotas.records import EventDocument, LimitsDocument, TenantLimitsDocument


async def tenant_limits(session: AsyncSession, tenant_id: UUID) -> TenantLimitsDocument:
    """Return the limits of a tenant, for operators. Raises `TenantNotFound`."""
    await TenantRepository(session).by_id(tenant_id)
    state = await QuotaRepository(session, tenant_id).tenant()
    return TenantLimitsDocument.of(state.limits, state.revision)


async def key_limits(session: AsyncSession, tenant_id: UUID, key_id: str) -> LimitsDocument:
    """Return the limits of a key. Raises `KeyNotFound`."""
    state = await QuotaRepository(session, tenant_id).key(key_id)
    return LimitsDocument.of(state.limits, state.revision)


async def adapter_limits(session: AsyncSession, tenant_id: UUID, name: str) -> LimitsDocument:
    """Return the limits of an adapter. Raises `AdapterNotFound`."""
    state = await QuotaRepository(session, tenant_id).adapter(name)
    return LimitsDocument.of(state.limits, state.revision)


async def events(
    session: AsyncSession, tenant_id: UUID, after: tuple[datetime, UUID] | None, limit: int
) -> list[EventDocument]:
    """Return at most `limit` events of crossed budgets behind the one with that time and id, the newest first."""
    columns: tuple[Any, ...] = (
        *(QuotaEvent.id, QuotaEvent.created_at.label("at"), QuotaEvent.level, QuotaEvent.limit_name),
        *(QuotaEvent.period, QuotaEvent.threshold, QuotaEvent.used, QuotaEvent.limit_value.label("limit")),
        func.coalesce(ApiKey.key_id, Adapter.name).label("name"),
    )
    query = (
        select(*columns)
        .outerjoin(ApiKey, (QuotaEvent.level == "key") & (ApiKey.id == QuotaEvent.subject_id))
        .outerjoin(Adapter, (QuotaEvent.level == "adapter") & (Adapter.id == QuotaEvent.subject_id))
        .where(QuotaEvent.tenant_id == tenant_id)
    )
    part, order = Part(limit, after), (QuotaEvent.created_at, QuotaEvent.id)
    found = await session.execute(sliced(query, part, *order, newest_first=True))
    return [EventDocument.model_validate(row) for row in found]
