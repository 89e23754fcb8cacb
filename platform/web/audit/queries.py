"""Entries of the audit log with the names of what they speak of by id. Invariant: a query for each kind of id, none for an entry."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.audit_records import OperatorAuditDocument
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.models import ApiKey, Invitation, Tenant, User

NAMES: Final[Mapping[str, tuple[tuple[Any, Any], ...]]] = {
    "tenants": ((Tenant.id, Tenant.name),),
    "keys": ((ApiKey.key_id, ApiKey.name),),
    "users": ((User.id, User.email), (Invitation.id, Invitation.email)),
}
"""The parts of targets that an id follows -> the columns of the id and of the name."""


class NamedEntry(OperatorAuditDocument):
    """`actor_name`, `target_name`: with names in the place of ids, where there are such."""

    tenant: str | None
    actor_name: str
    target_name: str


async def named_entries(session: AsyncSession, *args: Any, **kwargs: Any) -> list[NamedEntry]:
    """Return what `audit_entries` does, with names."""
    entries = await audit_entries(session, *args, **kwargs)
    names = await _names(session, entries)
    return [_named(entry, names) for entry in entries]


def _named(entry: OperatorAuditDocument, names: Mapping[tuple[str, str], str]) -> NamedEntry:
    parts = entry.target.split("/")
    for place in range(1, len(parts), 2):
        parts[place] = names.get((parts[place - 1], parts[place]), parts[place])
    return NamedEntry(
        **dict(entry),
        tenant=names.get(("tenants", str(entry.tenant_id))),
        actor_name=names.get(("keys", entry.actor), entry.actor),
        target_name="/".join(parts),
    )


async def _names(
    session: AsyncSession, entries: Sequence[OperatorAuditDocument]
) -> dict[tuple[str, str], str]:
    wanted: dict[str, set[str]] = defaultdict(set)
    for kind, each in (found for entry in entries for found in _ids(entry)):
        wanted[kind].add(each)
    names: dict[tuple[str, str], str] = {}
    for kind, texts in wanted.items():
        for column, name in NAMES.get(kind, ()):
            ids = texts if kind == "keys" else {canonical_uuid(each) for each in texts} - {None}
            rows = await session.execute(select(column, name).where(column.in_(ids)))
            names |= {(kind, str(each)): text for each, text in rows}
    return names


def _ids(entry: OperatorAuditDocument) -> Iterator[tuple[str, str]]:
    if entry.tenant_id is not None:
        yield "tenants", str(entry.tenant_id)
    if entry.actor_kind in ("key", "operator"):
        yield "keys", entry.actor
    parts = entry.target.split("/")
    yield from zip(parts[::2], parts[1::2], strict=False)
