"""Tenants that are suspended and resumed without an audit entry."""

from datetime import UTC, datetime

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.models import Tenant


async def suspend(session: AsyncSession, name: str) -> Tenant:
    tenant = await TenantRepository(session).get(name)
    tenant.suspended_at = datetime.now(UTC)
    await session.flush()
    return tenant


async def resume(session: AsyncSession, name: str) -> Tenant:
    tenant = await TenantRepository(session).get(name)
    tenant.suspended_at = None
    await session.flush()
    return tenant
