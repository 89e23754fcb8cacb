"""Reads tenants."""

from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.records import TenantAccountDocument
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.errors import InvalidField, TenantNotFound
from loraplex.tenants.models import Tenant
from loraplex.tenants.pages import Slice, sliced


async def tenants(session: AsyncSession, part: Slice[str], prefix: str = "") -> list[TenantAccountDocument]:
    """Return living tenants by name, those whose names begin with `prefix`."""
    query = select(Tenant).where(Tenant.deleted_at.is_(None), Tenant.name.startswith(prefix, autoescape=True))
    rows = await session.scalars(sliced(query, part, Tenant.name))
    return [TenantAccountDocument.model_validate(row) for row in rows]


async def tenant(session: AsyncSession, tenant_id: UUID) -> TenantAccountDocument:
    """Return one tenant, also a deleted one. Raises `TenantNotFound`."""
    return TenantAccountDocument.model_validate(await TenantRepository(session).by_id(tenant_id))


async def tenant_named(session: AsyncSession, name: str) -> UUID:
    """Return the id of the living tenant of this name, which a form names. Raises `InvalidField`."""
    try:
        return (await TenantRepository(session).get(name)).id
    except TenantNotFound as error:
        raise InvalidField("tenant", f"there is no tenant {name[:80]}") from error
