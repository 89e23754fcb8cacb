"""Reads the audit log. Invariant: a tenant reads the addresses of its own keys and people only, an operator reads all."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from loraplex.tenants.audit_records import OperatorAuditDocument
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
    until: datetime | None = None,
    about: str | None = None,
    to_operator: bool = False,
) -> list[OperatorAuditDocument]:
    """Return entries, newest first, behind the entry `after`; None for `tenant_id`: of every tenant and of none.

    `filters`: names of `FILTERS` and the value each must have. `since`, and `until`, exclusive, bound their time. `about`:
    the target, or what the targets are parts of. `to_operator`: with all addresses.
    """
    query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)
    if since is not None:
        query = query.where(AuditEntry.id >= uuid7_from(since))
    if until is not None:
        query = query.where(AuditEntry.id < uuid7_from(until))
    if tenant_id is not None:
        query = query.where(AuditEntry.tenant_id == tenant_id)
    if about is not None:
        parts = AuditEntry.target.startswith(f"{about}/", autoescape=True)
        query = query.where((AuditEntry.target == about) | parts)
    for name, value in filters.items():
        query = query.where(FILTERS[name] == value)
    if after is not None:
        query = query.where(AuditEntry.id < after)
    return [entry_record(row, to_operator=to_operator) for row in await session.scalars(query)]


async def last_authors(
    session: AsyncSession, tenant_id: UUID, action: str, targets: Collection[str]
) -> dict[str, OperatorAuditDocument]:
    """Return the newest entry of each target about this action, among the tenant's newest `READ_BACK` entries."""
    newest = select(AuditEntry).where(AuditEntry.tenant_id == tenant_id)
    entry = aliased(AuditEntry, newest.order_by(AuditEntry.id.desc()).limit(READ_BACK).subquery())
    query = select(entry).where(entry.action == action, entry.target.in_(targets)).order_by(entry.id)
    return {row.target: entry_record(row, to_operator=False) for row in await session.scalars(query)}


def entry_record(row: AuditEntry, *, to_operator: bool) -> OperatorAuditDocument:
    """Return an entry with the client's address as the reader may know it."""
    entry = OperatorAuditDocument.model_validate(row)
    is_visible = to_operator or row.actor_kind in ("key", "user")
    return entry if is_visible else entry.model_copy(update={"address": None})
