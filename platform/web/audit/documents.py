"""The part of an audit entry that both planes return."""

from typing import Any, Final
from uuid import UUID

from loraplex.platform.services.audit import address
from loraplex.platform.web.responses import ResponseModel
from loraplex.platform.web.sorting import SortOrder, by_id
from loraplex.tenants.models import AuditEntry
from loraplex.tenants.records import UtcTime

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


def fields(entry: AuditEntry, *, to_operator: bool) -> dict[str, Any]:
    """Return the fields of `AuditedChange`."""
    values = {name: getattr(entry, name) for name in AuditedChange.model_fields}
    return {**values, "address": address(entry, to_operator=to_operator)}
