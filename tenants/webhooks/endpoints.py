"""A tenant's webhook endpoints and their deliveries. Invariant: endpoints of one tenant are added one at a time, so that it
never has more than `MAX_ENDPOINTS`.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import func, select, text, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import (
    CountReached,
    DeliveryNotFound,
    DeliveryPending,
    InvalidField,
    WebhookNotFound,
)
from loraplex.tenants.models import DELIVERY_STATES, OutboxEvent, WebhookDelivery, WebhookEndpoint
from loraplex.tenants.webhooks.deliveries import MAX_AGE, MAX_ATTEMPTS

MAX_ENDPOINTS: Final = 16
LOCK: Final = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")
Position = tuple[datetime, UUID]
Delivery = tuple[WebhookDelivery, str]
"""A delivery and the type of its event."""


class WebhookRepository:
    """The endpoints of `tenant_id`, seen by one session."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def add(self, endpoint: WebhookEndpoint) -> None:
        """Add an endpoint. Raises `CountReached`."""
        await self._session.execute(LOCK, {"name": f"webhooks:{self._tenant_id}"})
        query = select(func.count()).where(WebhookEndpoint.tenant_id == self._tenant_id)
        if (await self._session.scalars(query)).one() >= MAX_ENDPOINTS:
            raise CountReached(
                "max_webhooks", f"a tenant has at most {MAX_ENDPOINTS} webhooks: delete one first"
            )
        self._session.add(endpoint)
        await self._session.flush()

    async def get(self, endpoint_id: UUID, *, locked: bool = False) -> WebhookEndpoint:
        """One endpoint; `locked`: until the transaction ends. Raises `WebhookNotFound`."""
        query = select(WebhookEndpoint).where(
            WebhookEndpoint.tenant_id == self._tenant_id, WebhookEndpoint.id == endpoint_id
        )
        found = (await self._session.scalars(query.with_for_update() if locked else query)).one_or_none()
        if found is None:
            raise WebhookNotFound("no such webhook")
        return found

    async def page(self, after: Position | None, limit: int) -> Sequence[WebhookEndpoint]:
        """Endpoints after `after`, oldest first."""
        position = tuple_(WebhookEndpoint.created_at, WebhookEndpoint.id)
        query = select(WebhookEndpoint).where(WebhookEndpoint.tenant_id == self._tenant_id)
        if after is not None:
            query = query.where(position > after)
        return (await self._session.scalars(query.order_by(*position).limit(limit))).all()

    async def delete(self, endpoint: WebhookEndpoint) -> None:
        """Delete an endpoint and its deliveries."""
        await self._session.delete(endpoint)
        await self._session.flush()

    async def deliveries(
        self, endpoint_id: UUID, state: str | None, after: Position | None, limit: int
    ) -> Sequence[Delivery]:
        """Deliveries of an endpoint after `after`, newest first. `state`: only those in it, None for all.

        Raises `WebhookNotFound`, and `InvalidField` for an unknown state.
        """
        if state is not None and state not in DELIVERY_STATES:
            raise InvalidField("state", f"`state` must be one of: {', '.join(DELIVERY_STATES)}")
        await self.get(endpoint_id)
        query = (
            select(WebhookDelivery, OutboxEvent.type)
            .join(OutboxEvent, OutboxEvent.id == WebhookDelivery.event_id)
            .where(WebhookDelivery.endpoint_id == endpoint_id)
            .order_by(WebhookDelivery.created_at.desc(), WebhookDelivery.id.desc())
            .limit(limit)
        )
        if state is not None:
            query = query.where(WebhookDelivery.state == state)
        if after is not None:
            query = query.where(tuple_(WebhookDelivery.created_at, WebhookDelivery.id) < after)
        return [(delivery, kind) for delivery, kind in await self._session.execute(query)]

    async def delivery(self, endpoint_id: UUID, delivery_id: UUID) -> Delivery:
        """One delivery of an endpoint, locked until the transaction ends. Raises `WebhookNotFound`, `DeliveryNotFound`."""
        await self.get(endpoint_id)
        query = (
            select(WebhookDelivery, OutboxEvent.type)
            .join(OutboxEvent, OutboxEvent.id == WebhookDelivery.event_id)
            .where(WebhookDelivery.id == delivery_id, WebhookDelivery.endpoint_id == endpoint_id)
            .with_for_update(of=WebhookDelivery)
        )
        found = (await self._session.execute(query)).one_or_none()
        if found is None:
            raise DeliveryNotFound("this webhook has no such delivery")
        return found[0], found[1]

    async def with_event(self, endpoint_id: UUID, delivery_id: UUID) -> tuple[WebhookDelivery, OutboxEvent]:
        """One delivery of an endpoint with its event, to be read. Raises `WebhookNotFound`, `DeliveryNotFound`."""
        await self.get(endpoint_id)
        query = (
            select(WebhookDelivery, OutboxEvent)
            .join(OutboxEvent, OutboxEvent.id == WebhookDelivery.event_id)
            .where(WebhookDelivery.id == delivery_id, WebhookDelivery.endpoint_id == endpoint_id)
        )
        found = (await self._session.execute(query)).one_or_none()
        if found is None:
            raise DeliveryNotFound("this webhook has no such delivery")
        return found[0], found[1]

    async def open_counts(self) -> Mapping[tuple[UUID, str], int]:
        """The number of deliveries that are not delivered, by endpoint and state: `pending` or `dead`."""
        query = (
            select(WebhookDelivery.endpoint_id, WebhookDelivery.state, func.count())
            .where(WebhookDelivery.tenant_id == self._tenant_id, WebhookDelivery.state != "delivered")
            .group_by(WebhookDelivery.endpoint_id, WebhookDelivery.state)
        )
        return {(endpoint, state): number for endpoint, state, number in await self._session.execute(query)}

    async def discard(self, delivery: WebhookDelivery) -> None:
        """Delete an ended delivery; its event and its deliveries elsewhere stay. Raises `DeliveryPending`."""
        _require_ended(delivery)
        await self._session.delete(delivery)
        await self._session.flush()

    async def replay(self, delivery: WebhookDelivery) -> None:
        """Repeat an ended delivery from now on, with as many attempts as a new one. Raises `DeliveryPending`."""
        _require_ended(delivery)
        now = (await self._session.scalars(select(func.now()))).one()
        delivery.state, delivery.ended_at, delivery.due_at = "pending", None, now
        delivery.attempts_left, delivery.expires_at = MAX_ATTEMPTS, now + MAX_AGE
        await self._session.flush()


def _require_ended(delivery: WebhookDelivery) -> None:
    if delivery.state == "pending":
        raise DeliveryPending("the delivery has not ended: it is attempted until it is delivered or dead")
