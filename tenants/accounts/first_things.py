"""Whether a tenant has a key, a ready adapter, an answered request and a budget. Invariant: one statement, from indexes and rollups."""

from typing import Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

_THINGS: Final = text("""
SELECT EXISTS (SELECT FROM api_keys WHERE tenant_id = :tenant_id AND kind = 'key') AS key,
    EXISTS (
        SELECT FROM adapter_versions v JOIN adapters a ON a.id = v.adapter_id
        WHERE v.tenant_id = :tenant_id AND v.state = 'ready' AND a.deleted_at IS NULL
    ) AS adapter,
    EXISTS (SELECT FROM request_rollups WHERE tenant_id = :tenant_id AND status = 'completed') AS request,
    EXISTS (
        SELECT FROM quotas WHERE tenant_id = :tenant_id AND num_nonnulls(budget_per_day, budget_per_month) > 0
    ) AS budget
""")


async def first_things(session: AsyncSession, tenant_id: UUID) -> frozenset[str]:
    """The names of those that exist: `key`, `adapter`, `request`, `budget`."""
    found = (await session.execute(_THINGS, {"tenant_id": tenant_id})).one()
    return frozenset(name for name, exists in found._mapping.items() if exists)
