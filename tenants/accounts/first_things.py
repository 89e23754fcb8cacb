"""Whether a tenant has a key of its own, a ready adapter, an answered request and a budget.

Invariant: one statement, from indexes and rollups.
"""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

# Who made a key that an operator, a command or the demo made saw its text; people of the tenant need not have.
_THINGS: Final = text("""
SELECT (
        SELECT ARRAY[name, key_id] FROM api_keys
        WHERE tenant_id = :tenant_id AND kind = 'key' AND created_by NOT IN ('operator', 'command', 'system')
        ORDER BY created_at LIMIT 1
    ) AS key,
    EXISTS (
        SELECT FROM adapter_versions v JOIN adapters a ON a.id = v.adapter_id
        WHERE v.tenant_id = :tenant_id AND v.state = 'ready' AND a.deleted_at IS NULL
    ) AS adapter,
    EXISTS (SELECT FROM request_rollups WHERE tenant_id = :tenant_id AND status = 'completed') AS request,
    EXISTS (
        SELECT FROM quotas WHERE tenant_id = :tenant_id AND num_nonnulls(budget_per_day, budget_per_month) > 0
    ) AS budget
""")


async def first_things(session: AsyncSession, tenant_id: UUID) -> Mapping[str, Any]:
    """Those that exist: `adapter`, `request`, `budget`, and `key` with name and public id of the oldest that the tenant's
    people and keys made.
    """
    found = (await session.execute(_THINGS, {"tenant_id": tenant_id})).one()
    return {name: value for name, value in found._mapping.items() if value}
