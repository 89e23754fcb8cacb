"""What the ids in entries of the audit log are called. Invariant: a query for each kind of id, none for an entry."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.web.console.formatting import short_id
from loraplex.tenants.audit_records import OperatorAuditDocument
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.models import ApiKey, Invitation, Tenant, User

Names: TypeAlias = Mapping[tuple[str, str], str]
"""The part of a target before an id, and the id -> the name. That of a key has its short id behind it: it may be any text."""
NAMED: Final[Mapping[str, tuple[tuple[Any, Any], ...]]] = {
    "tenants": ((Tenant.id, Tenant.name),),
    "keys": ((ApiKey.key_id, ApiKey.name),),
    "users": ((User.id, User.email), (Invitation.id, Invitation.email)),
}


async def names_in(session: AsyncSession, entries: Sequence[OperatorAuditDocument]) -> Names:
    """Return the names of the tenants, actors and targets of these entries."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for kind, each in (found for entry in entries for found in _ids(entry)):
        wanted[kind].add(each)
    names: dict[tuple[str, str], str] = {}
    for kind, texts in wanted.items():
        for column, name in NAMED.get(kind, ()):
            ids = texts if kind == "keys" else {canonical_uuid(each) for each in texts} - {None}
            # The invitation of the first operator has no address.
            rows = await session.execute(select(column, name).where(column.in_(ids), name.is_not(None)))
            for each, text in rows:
                names[kind, str(each)] = f"{text} ({short_id(each)})" if kind == "keys" else text
    return names


def named_target(target: str, names: Names) -> str:
    """Return a target with names in the place of ids."""
    parts = target.split("/")
    for place in range(1, len(parts), 2):
        parts[place] = names.get((parts[place - 1], parts[place]), parts[place])
    return "/".join(parts)


def _ids(entry: OperatorAuditDocument) -> Iterator[tuple[str, str]]:
    yield "tenants", str(entry.tenant_id)
    if entry.actor_kind in ("key", "operator"):
        yield "keys", entry.actor
    parts = entry.target.split("/")
    yield from zip(parts[::2], parts[1::2], strict=False)
