"""Request and response schemas of `/tenant/v1/webhooks`. Invariant: no response contains a secret but that to its creation."""

from typing import Annotated
from uuid import UUID

from pydantic import Field, WithJsonSchema

from loraplex.platform.web.request_bodies import RequestModel
from loraplex.platform.web.responses import ResponseModel, UtcTime
from loraplex.tenants.models import DELIVERY_STATES, EVENT_TYPES, WebhookEndpoint
from loraplex.tenants.webhooks.endpoints import Delivery
from loraplex.tenants.webhooks.receiver_urls import MAX_URL_LENGTH
from loraplex.tenants.webhooks.use_cases import MAX_GRACE_S, IssuedWebhook

DEFAULT_GRACE_S = 24 * 3600
Url = Annotated[str, Field(min_length=1, max_length=MAX_URL_LENGTH)]
EventType = Annotated[str, WithJsonSchema({"type": "string", "enum": list(EVENT_TYPES)})]
DeliveryState = Annotated[str, WithJsonSchema({"type": "string", "enum": list(DELIVERY_STATES)})]
EventTypes = Annotated[list[EventType], Field(min_length=1, max_length=2 * len(EVENT_TYPES))]


class NewWebhookBody(RequestModel):
    """`url`: `https`, port 443 or 1024 to 65535, on a public address. `events`: the types of events that it receives."""

    url: Url
    events: EventTypes


class WebhookPatch(RequestModel):
    """The fields to change; those that are absent stay unchanged."""

    url: Url = Field(default_factory=str)
    events: EventTypes = Field(default_factory=list)


class WebhookRotateBody(RequestModel):
    """`grace_seconds`: how long messages are signed with the replaced secret, too."""

    grace_seconds: int = Field(default=DEFAULT_GRACE_S, ge=0, le=MAX_GRACE_S)


class WebhookDocument(ResponseModel):
    """`previous_secret_until`: until then, messages are signed with the replaced secret, too. `revision`: the ETag."""

    id: UUID
    url: str
    events: list[str]
    previous_secret_until: UtcTime | None
    created_at: UtcTime
    revision: int


class NewWebhookDocument(WebhookDocument):
    """`secret` (`whsec_…`) is returned here and never again."""

    secret: str


class DeliveryDocument(ResponseModel):
    """One event for one endpoint. `attempts`: how many were made. `next_attempt_at` is null when it has ended: delivered, or
    dead, after 10 attempts or 5 days. `last_status`: the status of the last response, null without one. `last_error`: why it
    did not count as received.
    """

    id: UUID
    event_id: UUID
    type: str
    state: DeliveryState
    attempts: int
    next_attempt_at: UtcTime | None
    last_attempt_at: UtcTime | None
    last_status: int | None
    last_error: str | None
    created_at: UtcTime
    ended_at: UtcTime | None


def to_response(record: WebhookEndpoint) -> WebhookDocument:
    return WebhookDocument(
        id=record.id,
        url=record.url,
        events=record.events,
        previous_secret_until=record.previous_until,
        created_at=record.created_at,
        revision=record.revision,
    )


def new_webhook_document(issued: IssuedWebhook) -> NewWebhookDocument:
    return NewWebhookDocument(**to_response(issued.record).model_dump(), secret=issued.secret)


def delivery_document(delivery: Delivery) -> DeliveryDocument:
    row, event_type = delivery
    return DeliveryDocument(
        id=row.id,
        event_id=row.event_id,
        type=event_type,
        state=row.state,
        attempts=row.attempts,
        next_attempt_at=row.due_at if row.state == "pending" else None,
        last_attempt_at=row.last_attempt_at,
        last_status=row.last_status,
        last_error=row.last_error,
        created_at=row.created_at,
        ended_at=row.ended_at,
    )
