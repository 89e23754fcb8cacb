"""Writes events. Invariant: an event is in the outbox exactly if the transaction that it reports was committed, and once."""

from typing import Final
from uuid import UUID

import msgspec
from sqlalchemy import bindparam, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.webhooks.events import InvoiceFinalized

ADD: Final = text(
    "INSERT INTO outbox_events (id, tenant_id, type, subject, data)"
    " VALUES (outbox_event_id(:tenant_id, :type, :subject), :tenant_id, :type, :subject, :data)"
    " ON CONFLICT DO NOTHING"
).bindparams(bindparam("data", type_=JSONB))


class Outbox:
    """The outbox, written in the transaction of `session`, one of an operator."""

    @staticmethod
    async def add(session: AsyncSession, tenant_id: UUID, event: InvoiceFinalized) -> None:
        """Add an event of a tenant. Adding the same event again changes nothing."""
        row = {
            "tenant_id": tenant_id,
            "type": event.TYPE,
            "subject": event.subject,
            "data": msgspec.to_builtins(event),
        }
        await session.execute(ADD, row)
