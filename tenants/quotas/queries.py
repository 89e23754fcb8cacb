"""Reads limits of tenants, keys and adapters as they are set, and events of crossed budgets."""

from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository
from loraplex.tenants.quotas.records import EventDocument, LimitsDocument, TenantLimitsDocument
from loraplex.tenants.quotas.tenant_quotas import TenantQuotas
from loraplex.tenants.quotas.threshold_events import quota_events


async def tenant_limits(session: AsyncSession, tenant_id: UUID) -> TenantLimitsDocument:
    """Return the limits of a tenant, for operators. Raises `TenantNotFound`."""
    tenant = await TenantRepository(session).by_id(tenant_id)
    limits, revision = await TenantQuotas(session).get(tenant.id)
    return TenantLimitsDocument.of(limits, revision)


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
    return [
        EventDocument(
            id=row.id,
            at=row.created_at,
            level=row.level,
            name=key_id or adapter,
            limit_name=row.limit_name,
            period=row.period,
            threshold=row.threshold,
            used=row.used,
            limit=row.limit_value,
        )
        for row, key_id, adapter in await quota_events(session, tenant_id, after, limit)
    ]
