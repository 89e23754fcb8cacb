"""The rows of webhooks and deliveries, for use cases that change them."""

from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import DeliveryNotFound, WebhookNotFound
from loraplex.tenants.webhooks.tables import WebhookDelivery, WebhookEndpoint


async def webhook_row(
    session: AsyncSession, tenant_id: UUID, webhook_id: UUID, *, locked: bool = False
) -> WebhookEndpoint:
    """Return the row of a webhook; `locked`: until the transaction ends. Raises `WebhookNotFound`."""
    query = select(WebhookEndpoint).where(
        WebhookEndpoint.tenant_id == tenant_id, WebhookEndpoint.id == webhook_id
    )
    found = (await session.scalars(query.with_for_update() if locked else query)).one_or_none()
    if found is None:
        raise WebhookNotFound("no such webhook")
    return found


async def delivery_row(
    session: AsyncSession, tenant_id: UUID, webhook_id: UUID, delivery_id: UUID, *, locked: bool = False
) -> WebhookDelivery:
    """Return the row of a delivery; `locked` as in `webhook_row`. Raises `WebhookNotFound`, `DeliveryNotFound`."""
    await webhook_row(session, tenant_id, webhook_id)
    query = select(WebhookDelivery).where(
        WebhookDelivery.id == delivery_id, WebhookDelivery.endpoint_id == webhook_id
    )
    found = (await session.scalars(query.with_for_update() if locked else query)).one_or_none()
    if found is None:
        raise DeliveryNotFound("this webhook has no such delivery")
    return found
