"""The part of an audit entry that both planes return. Invariant: each plane decides itself whose addresses it returns."""

from typing import Any, Final
from uuid import UUID

from loraplex.platform.api.management.responses import ResponseModel, UtcTime
from loraplex.platform.api.management.sorting import SortOrder, by_id
from loraplex.tenants.models import AuditEntry

BY_ID: Final[SortOrder[AuditEntry, UUID]] = by_id(lambda entry: entry.id)


class AuditedChange(ResponseModel):
    """Base of the response schemas of an audit entry."""

    id: UUID
    at: UtcTime
    actor_kind: str
    actor: str
    action: str
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    address: str | None
    request_id: str | None


def fields(entry: AuditEntry) -> dict[str, Any]:
    """Return the fields of `AuditedChange`."""
    values = {name: getattr(entry, name) for name in AuditedChange.model_fields}
    return {**values, "address": None if entry.address is None else str(entry.address)}
