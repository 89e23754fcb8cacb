"""Reads webhooks and deliveries of one tenant."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import DeliveryNotFound, InvalidField
from loraplex.tenants.pages import Slice, sliced
from loraplex.tenants.webhooks.events import event_body
from loraplex.tenants.webhooks.records import (
    DELIVERY_STATES,
    MAX_WEBHOOKS,
    DeliveryDocument,
    SentEvent,
    WebhookDocument,
)
from loraplex.tenants.webhooks.rows import webhook_row
from loraplex.tenants.webhooks.tables import OutboxEvent, WebhookDelivery, WebhookEndpoint

Position = tuple[datetime, UUID]


async def webhooks(
    session: AsyncSession, tenant_id: UUID, part: Slice[Position] | None = None
) -> list[WebhookDocument]:
    """Return webhooks, the oldest first; without `part` all of them."""
    query = select(WebhookEndpoint).where(WebhookEndpoint.tenant_id == tenant_id)
    order = (WebhookEndpoint.created_at, WebhookEndpoint.id)
    query = query.order_by(*order).limit(MAX_WEBHOOKS) if part is None else sliced(query, part, *order)
    return [WebhookDocument.model_validate(row) for row in await session.scalars(query)]


async def webhook(session: AsyncSession, tenant_id: UUID, webhook_id: UUID) -> WebhookDocument:
    """Return one webhook. Raises `WebhookNotFound`."""
    return WebhookDocument.model_validate(await webhook_row(session, tenant_id, webhook_id))


async def open_deliveries(session: AsyncSession, tenant_id: UUID) -> Mapping[UUID, Mapping[str, int]]:
    """Count the deliveries of each webhook that are `pending` or `dead`; 0 where there are none."""
    query = (
        select(WebhookDelivery.endpoint_id, WebhookDelivery.state, func.count())
        .where(WebhookDelivery.tenant_id == tenant_id, WebhookDelivery.state != "delivered")
        .group_by(WebhookDelivery.endpoint_id, WebhookDelivery.state)
    )
    counts: dict[UUID, Counter[str]] = defaultdict(Counter)
    for webhook_id, state, number in await session.execute(query):
        counts[webhook_id][state] = number
    return counts


async def deliveries(
    session: AsyncSession, tenant_id: UUID, webhook_id: UUID, state: str | None, part: Slice[Position]
) -> list[DeliveryDocument]:
    """Return deliveries of a webhook, the newest first. `state`: only those in it, None for all.

    Raises `WebhookNotFound`, and `InvalidField` for an unknown state.
    """
    if state is not None and state not in DELIVERY_STATES:
        raise InvalidField("state", f"`state` must be one of: {', '.join(DELIVERY_STATES)}")
    await webhook_row(session, tenant_id, webhook_id)
    query = select(WebhookDelivery).where(WebhookDelivery.endpoint_id == webhook_id)
    if state is not None:
        query = query.where(WebhookDelivery.state == state)
    query = sliced(query, part, WebhookDelivery.created_at, WebhookDelivery.id, newest_first=True)
    return [DeliveryDocument.model_validate(row) for row in await session.scalars(query)]


async def sent_event(
    session: AsyncSession, tenant_id: UUID, webhook_id: UUID, delivery_id: UUID
) -> SentEvent:
    """Return a delivery with its message. Raises `WebhookNotFound`, `DeliveryNotFound`."""
    await webhook_row(session, tenant_id, webhook_id)
    query = (
        select(WebhookDelivery, OutboxEvent)
        .join(OutboxEvent, OutboxEvent.id == WebhookDelivery.event_id)
        .where(WebhookDelivery.id == delivery_id, WebhookDelivery.endpoint_id == webhook_id)
    )
    found = (await session.execute(query)).one_or_none()
    if found is None:
        raise DeliveryNotFound("this webhook has no such delivery")
    delivery, event = found
    body = event_body(event.id, event.type, event.created_at, tenant_id, event.data)
    return SentEvent(
        delivery=DeliveryDocument.model_validate(delivery),
        body=msgspec.json.format(body, indent=2).decode(),
    )
