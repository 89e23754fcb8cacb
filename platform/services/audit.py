"""The audit log as its readers see it. Invariant: a tenant reads the addresses of its own keys and people only, an operator
reads all.
"""

from collections.abc import Mapping, Sequence
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.models import AuditEntry


async def entries(
    session: AsyncSession, tenant_id: UUID | None, filters: Mapping[str, str], after: UUID | None, limit: int
) -> Sequence[AuditEntry]:
    """Return at most `limit` entries, newest first, behind the entry `after`; of every tenant and of none if `tenant_id` is
    None. `filters`: `action`, `target` or `actor`, and the value each must have.
    """
    return await audit_entries(session, tenant_id, filters, after, limit)


def address(entry: AuditEntry, *, to_operator: bool) -> str | None:
    """Return the client's address as the reader of the entry may know it."""
    visible = to_operator or entry.actor_kind in ("key", "user")
    return str(entry.address) if visible and entry.address is not None else None
