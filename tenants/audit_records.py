"""Entries of the audit log, as both planes return them and the console shows them."""

from typing import Annotated, Any
from uuid import UUID

from pydantic import BeforeValidator

from loraplex.tenants.records import Record, UtcTime

Address = Annotated[str | None, BeforeValidator(lambda address: None if address is None else str(address))]


class AuditedChange(Record):
    """Base of the response schemas of an audit entry."""

    id: UUID
    at: UtcTime
    actor_kind: str
    actor: str
    action: str
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    address: Address
    request_id: str | None


class AuditDocument(AuditedChange):
    """`before` and `after` hold the fields that changed. The address is null where an operator or the system acted."""


class OperatorAuditDocument(AuditedChange):
    """`before` and `after` hold the fields that changed. `tenant_id` is null for a change that concerns no tenant."""

    tenant_id: UUID | None
