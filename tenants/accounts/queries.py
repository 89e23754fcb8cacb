"""Reads tenants."""

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.errors import InvalidField, TenantNotFound


async def tenant_named(session: AsyncSession, name: str) -> UUID:
    """Return the id of the living tenant of this name, which a form names. Raises `InvalidField`."""
    try:
        return (await TenantRepository(session).get(name)).id
    except TenantNotFound as error:
        raise InvalidField("tenant", f"there is no tenant {name[:80]}") from error
