"""Use cases on webhooks: create, change, rotate the secret, delete; repeat or discard a delivery.

Invariant: a secret leaves this module once, in `IssuedWebhook`; it is stored encrypted, and the audit log has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from loraplex.tenants.errors import InvalidField
from loraplex.tenants.models import EVENT_TYPES, WebhookEndpoint
from loraplex.tenants.unit_of_work import UnitOfWork, require_revision
from loraplex.tenants.webhooks.encrypted_secrets import WebhookSecrets
from loraplex.tenants.webhooks.endpoints import Delivery, WebhookRepository
from loraplex.tenants.webhooks.receiver_urls import parse_receiver_url
from loraplex.tenants.webhooks.signature import new_secret

MAX_GRACE_S: Final = 7 * 24 * 3600
"""The longest time in which the replaced secret of an endpoint signs as well."""


@dataclass(frozen=True, slots=True)
class WebhookRules:
    """What applies to every endpoint. `allow_private`: its URL may lead to a private network, and begin with `http`."""

    secrets: WebhookSecrets
    allow_private: bool

    def check_url(self, url: str) -> str:
        """Return the URL. Raises `InvalidField`."""
        parse_receiver_url(url, allow_private=self.allow_private)
        return url


@dataclass(frozen=True, slots=True)
class IssuedWebhook:
    """An endpoint with a new secret, which is returned once."""

    record: WebhookEndpoint
    secret: str = field(repr=False)


async def create(
    uow: UnitOfWork, rules: WebhookRules, tenant_id: UUID, url: str, events: Sequence[str]
) -> IssuedWebhook:
    """Add an endpoint for events of these types. Raises `InvalidField`, `CountReached`."""
    endpoint_id, secret = uuid4(), new_secret()
    endpoint = WebhookEndpoint(
        id=endpoint_id,
        tenant_id=tenant_id,
        url=rules.check_url(url),
        events=checked_events(events),
        sealed_secret=rules.secrets.encrypt(tenant_id, endpoint_id, secret),
    )
    await WebhookRepository(uow.session, tenant_id).add(endpoint)
    await uow.audit.record("webhook.create", target(endpoint), None, snapshot(endpoint), tenant_id=tenant_id)
    return IssuedWebhook(endpoint, secret)


async def change(
    uow: UnitOfWork,
    rules: WebhookRules,
    tenant_id: UUID,
    endpoint_id: UUID,
    *,
    url: str | None = None,
    events: Sequence[str] | None = None,
    seen: int | None = None,
) -> WebhookEndpoint:
    """Change URL and events; None leaves one as it is. Deliveries that wait go to the new URL. `seen`: the revision that the
    author has read, None for any.

    Raises `WebhookNotFound`, `RevisionMoved`, `InvalidField`.
    """
    endpoint = await WebhookRepository(uow.session, tenant_id).get(endpoint_id, locked=True)
    require_revision(seen, endpoint.revision)
    before = snapshot(endpoint)
    if url is not None:
        endpoint.url = rules.check_url(url)
    if events is not None:
        endpoint.events = checked_events(events)
    await uow.session.flush()
    after = snapshot(endpoint)
    if before != after:
        await uow.audit.record("webhook.change", target(endpoint), before, after, tenant_id=tenant_id)
    return endpoint


async def rotate(
    uow: UnitOfWork, rules: WebhookRules, tenant_id: UUID, endpoint_id: UUID, grace_s: int
) -> IssuedWebhook:
    """Replace the secret. For `grace_s` seconds, 0 to `MAX_GRACE_S`, messages are signed with the replaced one too.

    Raises `WebhookNotFound`.
    """
    endpoint = await WebhookRepository(uow.session, tenant_id).get(endpoint_id, locked=True)
    secret = new_secret()
    # A voided secret is empty: it signs nothing, so it has no grace.
    endpoint.previous_secret = (endpoint.sealed_secret or None) if grace_s else None
    has_previous = endpoint.previous_secret is not None
    endpoint.previous_until = datetime.now(UTC) + timedelta(seconds=grace_s) if has_previous else None
    endpoint.sealed_secret = rules.secrets.encrypt(tenant_id, endpoint_id, secret)
    await uow.session.flush()
    await uow.audit.record(
        "webhook.rotate", target(endpoint), None, {"grace_seconds": grace_s}, tenant_id=tenant_id
    )
    return IssuedWebhook(endpoint, secret)


async def delete(uow: UnitOfWork, tenant_id: UUID, endpoint_id: UUID) -> None:
    """Delete an endpoint and its deliveries. Raises `WebhookNotFound`."""
    webhooks = WebhookRepository(uow.session, tenant_id)
    endpoint = await webhooks.get(endpoint_id, locked=True)
    before = snapshot(endpoint)
    await webhooks.delete(endpoint)
    await uow.audit.record("webhook.delete", target(endpoint), before, None, tenant_id=tenant_id)


async def replay(uow: UnitOfWork, tenant_id: UUID, endpoint_id: UUID, delivery_id: UUID) -> Delivery:
    """Repeat an ended delivery, from now on and with as many attempts as a new one.

    Raises `WebhookNotFound`, `DeliveryNotFound`, `DeliveryPending`.
    """
    webhooks = WebhookRepository(uow.session, tenant_id)
    delivery, event_type = await webhooks.delivery(endpoint_id, delivery_id)
    before = {"state": delivery.state}
    await webhooks.replay(delivery)
    path = f"webhooks/{endpoint_id}/deliveries/{delivery_id}"
    await uow.audit.record("webhook.replay", path, before, {"state": delivery.state}, tenant_id=tenant_id)
    return delivery, event_type


async def discard(uow: UnitOfWork, tenant_id: UUID, endpoint_id: UUID, delivery_id: UUID) -> None:
    """Delete an ended delivery: it is neither listed nor repeated from then on.

    Raises `WebhookNotFound`, `DeliveryNotFound`, `DeliveryPending`.
    """
    webhooks = WebhookRepository(uow.session, tenant_id)
    delivery, event_type = await webhooks.delivery(endpoint_id, delivery_id)
    before = {"type": event_type, "state": delivery.state, "attempts": delivery.attempts}
    await webhooks.discard(delivery)
    path = f"webhooks/{endpoint_id}/deliveries/{delivery_id}"
    await uow.audit.record("webhook.discard", path, before, None, tenant_id=tenant_id)


def checked_events(events: Sequence[str]) -> list[str]:
    """Return the types without duplicates, in their usual order. Raises `InvalidField`."""
    unknown = [each for each in events if each not in EVENT_TYPES]
    if unknown or not events:
        raise InvalidField("events", f"`events` must be one or more of: {', '.join(EVENT_TYPES)}")
    return [each for each in EVENT_TYPES if each in events]


def snapshot(endpoint: WebhookEndpoint) -> dict[str, Any]:
    """Return an endpoint's fields for the audit log."""
    return {"url": endpoint.url, "events": endpoint.events}


def target(endpoint: WebhookEndpoint) -> str:
    """Return the endpoint's path in the audit log."""
    return f"webhooks/{endpoint.id}"
