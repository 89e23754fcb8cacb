"""What both planes show of the audit log. Invariant: each plane decides itself whose addresses it tells."""

from typing import Any, Final
from uuid import UUID

from loraplex.platform.api.management.responses import ResponseModel, UtcTime
from loraplex.platform.api.management.sorting import SortOrder, by_id
from loraplex.tenants.models import AuditEntry

BY_ID: Final[SortOrder[AuditEntry, UUID]] = by_id(lambda entry: entry.id)


class AuditedChange(ResponseModel):
    """Base of an audit entry's documents."""

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
    """Of `AuditedChange`."""
    values = {name: getattr(entry, name) for name in AuditedChange.model_fields}
    return {**values, "address": None if entry.address is None else str(entry.address)}
