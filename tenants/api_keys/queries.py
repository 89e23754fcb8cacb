"""Reads the keys of one tenant, or of the operators."""

from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.api_keys.keys import KeyRepository, of_owner
from loraplex.tenants.api_keys.records import KeyDocument
from loraplex.tenants.models import ApiKey
from loraplex.tenants.pages import Slice, sliced

Position = tuple[datetime, UUID]
"""When a key was created, and its internal id."""


async def keys(
    session: AsyncSession, tenant_id: UUID | None, part: Slice[Position] | None = None
) -> list[KeyDocument]:
    """Return keys of a tenant, or for None of the operators, the oldest first; without `part` all of them."""
    query = of_owner(tenant_id)
    if part is not None:
        query = sliced(query.order_by(None), part, ApiKey.created_at, ApiKey.id)
    return [KeyDocument.of(row) for row in await session.scalars(query)]


async def key(session: AsyncSession, tenant_id: UUID | None, key_id: str) -> KeyDocument:
    """Return one key. Raises `KeyNotFound`."""
    return KeyDocument.of(await KeyRepository(session).get(tenant_id, key_id))
