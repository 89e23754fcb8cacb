"""Webhook endpoints and their deliveries as the console shows them. Invariant: nothing here has a secret."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import DeliveryNotFound, InvalidField, WebhookNotFound
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.models import DELIVERY_STATES, EVENT_TYPES, WebhookDelivery, WebhookEndpoint
from loraplex.tenants.rfc3339 import utc_text, zoned_time
from loraplex.tenants.webhooks.deliveries import MAX_ATTEMPTS
from loraplex.tenants.webhooks.endpoints import MAX_ENDPOINTS, WebhookRepository
from loraplex.tenants.webhooks.events import event_body
from loraplex.tenants.webhooks.receiver_urls import MAX_URL_LENGTH

__all__ = ["DELIVERY_STATES", "EVENT_TYPES", "MAX_ATTEMPTS", "MAX_ENDPOINTS", "MAX_URL_LENGTH"]

PAGE: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """An endpoint. `waiting` and `dead` count its deliveries that are to be attempted, and those that were given up.

    `previous_until`: until then, messages are signed with the replaced secret, too.
    """

    id: UUID
    url: str
    events: tuple[str, ...]
    created_at: datetime
    previous_until: datetime | None
    revision: int
    waiting: int
    dead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One event for one endpoint. `next_attempt_at`: None once it has ended. `last_status`: of the last response, None
    without one. `last_error`: why that did not count as received.
    """

    id: UUID
    type: str
    state: str
    attempts: int
    next_attempt_at: datetime | None
    last_attempt_at: datetime | None
    last_status: int | None
    last_error: str | None
    created_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryPage:
    """Deliveries, the newest first. `older`: where the next page begins; None for the last."""

    rows: tuple[Delivery, ...]
    older: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentEvent:
    """A delivery with its message, the JSON text that is sent, indented for a reader."""

    delivery: Delivery
    event_id: UUID
    body: str


async def webhooks(session: AsyncSession, tenant_id: UUID) -> list[Webhook]:
    """Return all endpoints of a tenant, the oldest first."""
    repository = WebhookRepository(session, tenant_id)
    counts = await repository.open_counts()
    return [_webhook(each, counts) for each in await repository.page(None, MAX_ENDPOINTS)]


async def webhook(session: AsyncSession, tenant_id: UUID, identity: str) -> Webhook:
    """Return one endpoint by the text of its id. Raises `WebhookNotFound`."""
    repository = WebhookRepository(session, tenant_id)
    record = await repository.get(webhook_id(identity))
    return _webhook(record, await repository.open_counts())


async def deliveries(
    session: AsyncSession, tenant_id: UUID, identity: str, state: str | None, before: str
) -> DeliveryPage:
    """Return at most `PAGE` deliveries of an endpoint. `before`: the `older` of the page before, "" for the first one.

    Raises `WebhookNotFound`, and `InvalidField` for an unknown state or a place that no page has named.
    """
    repository = WebhookRepository(session, tenant_id)
    after = _place(before) if before else None
    found = await repository.deliveries(webhook_id(identity), state, after, PAGE + 1)
    last = found[PAGE - 1][0] if len(found) > PAGE else None
    return DeliveryPage(
        rows=tuple(_delivery(*each) for each in found[:PAGE]),
        older=None if last is None else f"{utc_text(last.created_at)},{last.id}",
    )


async def sent_event(session: AsyncSession, tenant_id: UUID, identity: str, delivery: str) -> SentEvent:
    """Return a delivery with its message. Raises `WebhookNotFound`, `DeliveryNotFound`."""
    repository = WebhookRepository(session, tenant_id)
    record, event = await repository.with_event(webhook_id(identity), delivery_id(delivery))
    body = event_body(event.id, event.type, event.created_at, tenant_id, event.data)
    return SentEvent(
        delivery=_delivery(record, event.type),
        event_id=event.id,
        body=msgspec.json.format(body, indent=2).decode(),
    )


def webhook_id(text: str) -> UUID:
    """Parse the id of an endpoint. Raises `WebhookNotFound`."""
    parsed = canonical_uuid(text)
    if parsed is None:
        raise WebhookNotFound("no such webhook")
    return parsed


def delivery_id(text: str) -> UUID:
    """Parse the id of a delivery. Raises `DeliveryNotFound`."""
    parsed = canonical_uuid(text)
    if parsed is None:
        raise DeliveryNotFound("this webhook has no such delivery")
    return parsed


def _place(text: str) -> tuple[datetime, UUID]:
    time, _, identity = text.partition(",")
    created_at, parsed = zoned_time(time), canonical_uuid(identity)
    if created_at is None or parsed is None:
        raise InvalidField("before", "there is no such page: begin with the newest deliveries")
    return created_at, parsed


def _webhook(record: WebhookEndpoint, counts: Mapping[tuple[UUID, str], int]) -> Webhook:
    return Webhook(
        id=record.id,
        url=record.url,
        events=tuple(record.events),
        created_at=record.created_at,
        previous_until=record.previous_until,
        revision=record.revision,
        waiting=counts.get((record.id, "pending"), 0),
        dead=counts.get((record.id, "dead"), 0),
    )


def _delivery(record: WebhookDelivery, event_type: str) -> Delivery:
    return Delivery(
        id=record.id,
        type=event_type,
        state=record.state,
        attempts=record.attempts,
        next_attempt_at=record.due_at if record.state == "pending" else None,
        last_attempt_at=record.last_attempt_at,
        last_status=record.last_status,
        last_error=record.last_error,
        created_at=record.created_at,
        ended_at=record.ended_at,
    )
