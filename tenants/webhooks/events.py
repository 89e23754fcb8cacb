"""The types of events and the data of each, as receivers get them, and how one is written.

Invariant: no data contains a secret, and a field of a version of a type is never renamed or removed. An event is in the
outbox exactly if the transaction that it reports was committed, and once.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, TypeAlias
from uuid import UUID

import msgspec
from sqlalchemy import bindparam, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession

ADD: Final = text(
    "INSERT INTO outbox_events (id, tenant_id, type, subject, data)"
    " VALUES (outbox_event_id(:tenant_id, :type, :subject), :tenant_id, :type, :subject, :data)"
    " ON CONFLICT DO NOTHING"
).bindparams(bindparam("data", type_=JSONB))
VERSION: Final = 1
"""The version of every type's data. A change that a receiver would notice takes the next one."""


class QuotaThreshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The use of a budget crossed `threshold` percent of its `limit`. Both numbers are tokens, or micro-units of money.

    `name`: the public id of the key, or the name of the adapter; null for the tenant itself.
    """

    level: str
    name: str | None
    limit_name: str
    period: str
    threshold: int
    used: int
    limit: int


class AdapterState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version of an adapter is now ready, rejected or quarantined. `digest` is null before validation."""

    adapter: str
    version: int
    digest: str | None
    state: str
    previous_state: str


class InvoiceFinalized(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An invoice has its number and never changes again. `month` as `2026-10`; `total_micro` in micro-units of `currency`."""

    TYPE: ClassVar[str] = "invoice.finalized"

    invoice_id: UUID
    number: str
    month: str
    currency: str
    total_micro: int

    @property
    def subject(self) -> str:
        """What the event is about: one invoice is finalized once."""
        return str(self.invoice_id)


class AliasReverted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A guard has set an alias back to the version `baseline`. `reason`: the bound that the version `canary` broke.

    `counts`: requests of both versions and what became of them, by the names of the alias's `guard.counts`, since the split
    `began_at`.
    """

    TYPE: ClassVar[str] = "alias.reverted"

    adapter: str
    alias: str
    baseline: int
    canary: int
    reason: str
    began_at: datetime
    counts: dict[str, int]

    @property
    def subject(self) -> str:
        """What the event is about: one split goes back once."""
        return f"{self.adapter}:{self.alias}/{self.began_at.isoformat()}"


EventData: TypeAlias = QuotaThreshold | AdapterState | InvoiceFinalized | AliasReverted
DATA_TYPES: Final[dict[str, type[EventData]]] = {
    "quota.threshold": QuotaThreshold,
    "adapter.ready": AdapterState,
    "adapter.rejected": AdapterState,
    "adapter.quarantined": AdapterState,
    InvoiceFinalized.TYPE: InvoiceFinalized,
    AliasReverted.TYPE: AliasReverted,
}
"""Every type of event with its data. Triggers write those of quotas and adapters."""


def event_body(
    event_id: UUID, event_type: str, created_at: datetime, tenant_id: UUID, data: Mapping[str, Any]
) -> bytes:
    """Build the message of an event as receivers get it: the same bytes each time."""
    document = {
        "id": event_id,
        "type": event_type,
        "version": VERSION,
        "timestamp": created_at.astimezone(UTC),
        "tenant_id": tenant_id,
        "data": data,
    }
    return msgspec.json.encode(document, order="deterministic")


async def add_event(session: AsyncSession, tenant_id: UUID, event: InvoiceFinalized | AliasReverted) -> None:
    """Add an event of a tenant, in the transaction of an operator that it reports. Adding it again changes nothing."""
    row = {
        "tenant_id": tenant_id,
        "type": event.TYPE,
        "subject": event.subject,
        "data": msgspec.to_builtins(event),
    }
    await session.execute(ADD, row)
