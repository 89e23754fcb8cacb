"""A tenant's webhook endpoints and what became of their deliveries. Invariant: nothing here contains a secret."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import WebhookNotFound
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.models import DELIVERY_STATES, EVENT_TYPES, WebhookEndpoint
from loraplex.tenants.outbox.endpoints import MAX_ENDPOINTS, Delivery, WebhookRepository
from loraplex.tenants.outbox.receiver_urls import MAX_URL_LENGTH

__all__ = [
    "DELIVERY_STATES",
    "EVENT_TYPES",
    "MAX_URL_LENGTH",
    "DeliveryRow",
    "WebhookDetail",
    "WebhookRow",
    "webhook",
    "webhook_id_of",
    "webhooks",
]

MAX_DELIVERIES: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRow:
    """One endpoint. Until `previous_until` messages are signed with the replaced secret, too."""

    id: UUID
    url: str
    events: tuple[str, ...]
    created_at: datetime
    previous_until: datetime | None
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRow:
    """One event for one endpoint. `next_at` None: it has ended. `status`: that of the last response, `error` why it did not count."""

    id: UUID
    event: str
    state: str
    attempts: int
    created_at: datetime
    next_at: datetime | None
    status: int | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookDetail:
    """An endpoint with its newest deliveries, the last one first."""

    row: WebhookRow
    deliveries: tuple[DeliveryRow, ...]


async def webhooks(session: AsyncSession, tenant_id: UUID) -> tuple[WebhookRow, ...]:
    """Read all endpoints, the oldest first."""
    return tuple(map(_row, await WebhookRepository(session, tenant_id).page(None, MAX_ENDPOINTS)))


async def webhook(session: AsyncSession, tenant_id: UUID, identity: UUID, state: str | None) -> WebhookDetail:
    """Read one endpoint and its deliveries, of all states for None. Raises `WebhookNotFound`, `InvalidField`."""
    repository = WebhookRepository(session, tenant_id)
    row = _row(await repository.get(identity))
    deliveries = await repository.deliveries(identity, state, None, MAX_DELIVERIES)
    return WebhookDetail(row=row, deliveries=tuple(map(_delivery, deliveries)))


def webhook_id_of(text: str) -> UUID:
    """Read the id of a path. Raises `WebhookNotFound`."""
    parsed = canonical_uuid(text)
    if parsed is None:
        raise WebhookNotFound("no such webhook")
    return parsed


def _row(endpoint: WebhookEndpoint) -> WebhookRow:
    return WebhookRow(
        id=endpoint.id,
        url=endpoint.url,
        events=tuple(endpoint.events),
        created_at=endpoint.created_at,
        previous_until=endpoint.previous_until,
        revision=endpoint.revision,
    )


def _delivery(found: Delivery) -> DeliveryRow:
    delivery, event = found
    return DeliveryRow(
        id=delivery.id,
        event=event,
        state=delivery.state,
        attempts=delivery.attempts,
        created_at=delivery.created_at,
        next_at=delivery.due_at if delivery.state == "pending" else None,
        status=delivery.last_status,
        error=delivery.last_error,
    )
