"""The audit log as the console shows it: pages of entries, each with its change field by field.

Invariant: a tenant reads its own entries only, and no address of an operator.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.services import audit
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.ids import canonical_uuid, uuid7_from
from loraplex.tenants.models import AuditEntry
from loraplex.tenants.rfc3339 import utc_text

__all__ = ["AuditFilter", "AuditPage", "AuditRow", "ChangedField", "InvalidField", "entries", "json_line"]

MAX_VALUE: Final = 2000
"""Characters of one value that a page shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Which entries to read. `tenant_id` None: of every tenant and of none, for operators. `until` is exclusive.

    `about`: a target with all that is part of it, such as an adapter with its aliases and versions.
    """

    tenant_id: UUID | None
    equal: Mapping[str, str] = field(default_factory=dict)
    about: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class ChangedField:
    """One field of a change as text; None: it did not exist on this side."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One change: who did what to which target. `address`: None where there is none, or where the reader may not know it."""

    id: UUID
    at: datetime
    actor_kind: str
    actor: str
    action: str
    target: str
    address: str | None
    request_id: str | None
    tenant_id: UUID | None
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    @property
    def changes(self) -> tuple[ChangedField, ...]:
        """The fields of both sides, in the order of their names."""
        before, after = self.before or {}, self.after or {}
        return tuple(
            ChangedField(name, _text(before, name), _text(after, name)) for name in sorted({*before, *after})
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Entries, the newest first. `older`: the id behind which the next page begins; None for the last."""

    rows: tuple[AuditRow, ...]
    older: UUID | None


async def entries(session: AsyncSession, chosen: AuditFilter, after: str | None, limit: int) -> AuditPage:
    """Read at most `limit` entries behind the entry `after`. Raises `InvalidField` for an `after` that is no id."""
    bounds = [each for each in (_behind(after), _before(chosen.until)) if each is not None]
    found = await audit_entries(
        session,
        chosen.tenant_id,
        chosen.equal,
        min(bounds, default=None),
        limit + 1,
        since=chosen.since,
        about=chosen.about,
    )
    rows = tuple(_row(each, to_operator=chosen.tenant_id is None) for each in found[:limit])
    return AuditPage(rows=rows, older=rows[-1].id if len(found) > limit else None)


def json_line(row: AuditRow) -> bytes:
    """Write an entry as one line of JSON, with the names of the API."""
    document = asdict(row) | {"id": str(row.id), "at": utc_text(row.at)}
    document["tenant_id"] = None if row.tenant_id is None else str(row.tenant_id)
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _row(entry: AuditEntry, *, to_operator: bool) -> AuditRow:
    return AuditRow(
        id=entry.id,
        at=entry.at,
        actor_kind=entry.actor_kind,
        actor=entry.actor,
        action=entry.action,
        target=entry.target,
        address=audit.address(entry, to_operator=to_operator),
        request_id=entry.request_id,
        tenant_id=entry.tenant_id,
        before=entry.before,
        after=entry.after,
    )


def _text(side: Mapping[str, Any], name: str) -> str | None:
    if name not in side:
        return None
    value = side[name]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


def _behind(after: str | None) -> UUID | None:
    parsed = None if after is None else canonical_uuid(after)
    if after is not None and parsed is None:
        raise InvalidField("after", "after must be the id of an entry")
    return parsed


def _before(until: datetime | None) -> UUID | None:
    """The least id at that time: entries behind it are older."""
    return None if until is None else uuid7_from(until)
