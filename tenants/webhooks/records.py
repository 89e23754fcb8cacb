"""Webhooks and their deliveries. Invariant: no record has a secret but that of its creation or rotation."""

from typing import Annotated, Final
from uuid import UUID

from pydantic import Field, WithJsonSchema

from loraplex.tenants.records import OneTimeSecret, Record, UtcTime

EVENT_TYPES: Final = (
    "quota.threshold",
    "adapter.ready",
    "adapter.rejected",
    "adapter.quarantined",
    "invoice.finalized",
    "alias.reverted",
)
DELIVERY_STATES: Final = ("pending", "delivered", "dead")
MAX_WEBHOOKS: Final = 16
"""The webhooks of one tenant."""
MAX_ATTEMPTS: Final = 10
MAX_GRACE_S: Final = 7 * 24 * 3600
"""The longest time in which a replaced secret signs as well."""
DeliveryState = Annotated[str, WithJsonSchema({"type": "string", "enum": list(DELIVERY_STATES)})]


class WebhookDocument(Record):
    """`previous_secret_until`: until then, messages are signed with the replaced secret, too. `revision`: the ETag."""

    id: UUID
    url: str
    events: list[str]
    previous_secret_until: UtcTime | None
    created_at: UtcTime
    revision: int


class NewWebhookDocument(WebhookDocument, OneTimeSecret):
    """`secret` (`whsec_…`) is returned here and never again."""

    secret: str = Field(repr=False)


class DeliveryDocument(Record):
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


class SentEvent(Record):
    """A delivery with its message: the JSON text that is sent, indented for a reader."""

    delivery: DeliveryDocument
    body: str
