"""Endpoints, events and deliveries for tests of webhooks."""

from collections.abc import Sequence
from uuid import UUID, uuid4

from sqlalchemy import select, text

from loraplex.tenants.database import Database
from loraplex.tenants.webhooks import events
from loraplex.tenants.webhooks.deliveries import Deliveries
from loraplex.tenants.webhooks.events import InvoiceFinalized
from loraplex.tenants.webhooks.records import EVENT_TYPES
from loraplex.tenants.webhooks.tables import WebhookDelivery, WebhookEndpoint

END = "UPDATE webhook_deliveries SET state = :state, ended_at = now(), attempts_left = 0 WHERE id = :id"


async def add_webhook(
    database: Database,
    tenant_id: UUID,
    url: str = "https://example.com/hooks",
    types: Sequence[str] = EVENT_TYPES,
    encrypted_secret: bytes = b"",
    endpoint_id: UUID | None = None,
) -> UUID:
    endpoint = WebhookEndpoint(
        id=endpoint_id or uuid4(),
        tenant_id=tenant_id,
        url=url,
        events=[*types],
        encrypted_secret=encrypted_secret,
    )
    async with database.as_tenant(tenant_id) as session:
        session.add(endpoint)
    return endpoint.id


async def add_event(database: Database, tenant_id: UUID) -> UUID:
    """Add `invoice.finalized` of a new invoice, whose id is returned."""
    invoice = InvoiceFinalized(
        invoice_id=uuid4(), number="2026-0001", month="2026-10", currency="USD", total_micro=1_250_000
    )
    async with database.as_operator() as session:
        await events.add_event(session, tenant_id, invoice)
    return invoice.invoice_id


async def dispatched(database: Database, endpoint_id: UUID) -> UUID:
    """The newest delivery of an endpoint, after a dispatch of all events."""
    async with database.as_operator() as session:
        await Deliveries(session).dispatch()
        query = select(WebhookDelivery.id).where(WebhookDelivery.endpoint_id == endpoint_id)
        newest = query.order_by(WebhookDelivery.created_at.desc(), WebhookDelivery.id.desc()).limit(1)
        return (await session.scalars(newest)).one()


async def end(database: Database, delivery_id: UUID, state: str) -> None:
    async with database.as_operator() as session:
        await session.execute(text(END), {"id": delivery_id, "state": state})
