"""Reads the audit log."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.models import AuditEntry

FILTERS: Final = {
    "action": AuditEntry.action,
    "target": AuditEntry.target,
    "actor": AuditEntry.actor,
}
READ_BACK: Final = 2000
"""The log has no index by target, so a search for the last author reads no more than this."""


async def audit_entries(
    session: AsyncSession,
    tenant_id: UUID | None,
    filters: Mapping[str, str],
    after: UUID | None,
    limit: int,
    *,
    since: datetime | None = None,
    about: str | None = None,
) -> Sequence[AuditEntry]:
    """Entries, newest first, behind the entry `after`; None for `tenant_id`: of every tenant and of none.

    `filters`: names of `FILTERS` and the value each must have. `since`: no entries from before. `about`: the target,
    or what the targets are parts of.
    """
    query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)
    if since is not None:
        query = query.where(AuditEntry.id >= uuid7_from(since))
    if tenant_id is not None:
        query = query.where(AuditEntry.tenant_id == tenant_id)
    if about is not None:
        parts = AuditEntry.target.startswith(f"{about}/", autoescape=True)
        query = query.where((AuditEntry.target == about) | parts)
    for name, value in filters.items():
        query = query.where(FILTERS[name] == value)
    if after is not None:
        query = query.where(AuditEntry.id < after)
    return (await session.scalars(query)).all()


async def last_authors(
    session: AsyncSession, tenant_id: UUID, action: str, targets: Collection[str]
) -> dict[str, AuditEntry]:
    """The newest entry of each target about this action, among the tenant's newest `READ_BACK` entries."""
    newest = select(AuditEntry).where(AuditEntry.tenant_id == tenant_id)
    entry = aliased(AuditEntry, newest.order_by(AuditEntry.id.desc()).limit(READ_BACK).subquery())
    query = select(entry).where(entry.action == action, entry.target.in_(targets)).order_by(entry.id)
    return {found.target: found for found in await session.scalars(query)}
