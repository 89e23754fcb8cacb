"""Use cases on webhooks: create, change, rotate the secret, delete; repeat or discard a delivery.

Invariant: a secret leaves this module once, in `NewWebhookDocument`; it is stored encrypted, and the audit log has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import func, select

from loraplex.tenants.database import lock
from loraplex.tenants.errors import CountReached, DeliveryPending, InvalidField
from loraplex.tenants.unit_of_work import UnitOfWork, require_revision
from loraplex.tenants.webhooks.deliveries import MAX_AGE
from loraplex.tenants.webhooks.encrypted_secrets import WebhookSecrets
from loraplex.tenants.webhooks.receiver_urls import parse_receiver_url
from loraplex.tenants.webhooks.records import (
    EVENT_TYPES,
    MAX_ATTEMPTS,
    MAX_WEBHOOKS,
    DeliveryDocument,
    NewWebhookDocument,
    WebhookDocument,
)
from loraplex.tenants.webhooks.rows import delivery_row, webhook_row
from loraplex.tenants.webhooks.signature import new_secret
from loraplex.tenants.webhooks.tables import WebhookDelivery, WebhookEndpoint


@dataclass(frozen=True, slots=True)
class WebhookRules:
    """What applies to every webhook. `allow_private`: its URL may lead to a private network, and begin with `http`."""

    secrets: WebhookSecrets
    allow_private: bool

    def check_url(self, url: str) -> str:
        """Return the URL. Raises `InvalidField`."""
        parse_receiver_url(url, allow_private=self.allow_private)
        return url


async def create(
    uow: UnitOfWork, tenant_id: UUID, rules: WebhookRules, url: str, events: Sequence[str]
) -> NewWebhookDocument:
    """Add a webhook for events of these types. Raises `InvalidField`, `CountReached`."""
    webhook_id, secret = uuid4(), new_secret()
    webhook = WebhookEndpoint(
        id=webhook_id,
        tenant_id=tenant_id,
        url=rules.check_url(url),
        events=checked_events(events),
        encrypted_secret=rules.secrets.encrypt(tenant_id, webhook_id, secret),
    )
    # Webhooks of one tenant are added one at a time, so that it never has more than allowed.
    await lock(uow.session, f"webhooks:{tenant_id}")
    count = select(func.count()).where(WebhookEndpoint.tenant_id == tenant_id)
    if (await uow.session.scalars(count)).one() >= MAX_WEBHOOKS:
        raise CountReached("max_webhooks", f"a tenant has at most {MAX_WEBHOOKS} webhooks: delete one first")
    uow.session.add(webhook)
    await uow.session.flush()
    await uow.audit.record("webhook.create", _target(webhook), None, _snapshot(webhook), tenant_id=tenant_id)
    return _issued(webhook, secret)


async def change(
    uow: UnitOfWork,
    tenant_id: UUID,
    webhook_id: UUID,
    rules: WebhookRules,
    *,
    url: str | None = None,
    events: Sequence[str] | None = None,
    seen: int | None = None,
) -> WebhookDocument:
    """Change URL and events; None leaves one as it is. Deliveries that wait go to the new URL. `seen`: the revision that the
    author has read, None for any.

    Raises `WebhookNotFound`, `RevisionMoved`, `InvalidField`.
    """
    webhook = await webhook_row(uow.session, tenant_id, webhook_id, locked=True)
    require_revision(seen, webhook.revision)
    before = _snapshot(webhook)
    if url is not None:
        webhook.url = rules.check_url(url)
    if events is not None:
        webhook.events = checked_events(events)
    await uow.session.flush()
    after = _snapshot(webhook)
    if before != after:
        await uow.audit.record("webhook.change", _target(webhook), before, after, tenant_id=tenant_id)
    return WebhookDocument.model_validate(webhook)


async def rotate(
    uow: UnitOfWork, tenant_id: UUID, webhook_id: UUID, rules: WebhookRules, grace_s: int
) -> NewWebhookDocument:
    """Replace the secret. For `grace_s` seconds, 0 to `MAX_GRACE_S`, messages are signed with the replaced one too.

    Raises `WebhookNotFound`.
    """
    webhook = await webhook_row(uow.session, tenant_id, webhook_id, locked=True)
    secret = new_secret()
    # A voided secret is empty: it signs nothing, so it has no grace.
    webhook.previous_secret = (webhook.encrypted_secret or None) if grace_s else None
    has_previous = webhook.previous_secret is not None
    webhook.previous_secret_until = datetime.now(UTC) + timedelta(seconds=grace_s) if has_previous else None
    webhook.encrypted_secret = rules.secrets.encrypt(tenant_id, webhook_id, secret)
    await uow.session.flush()
    after = {"grace_seconds": grace_s}
    await uow.audit.record("webhook.rotate", _target(webhook), None, after, tenant_id=tenant_id)
    return _issued(webhook, secret)


async def delete(uow: UnitOfWork, tenant_id: UUID, webhook_id: UUID) -> None:
    """Delete a webhook and its deliveries. Raises `WebhookNotFound`."""
    webhook = await webhook_row(uow.session, tenant_id, webhook_id, locked=True)
    before = _snapshot(webhook)
    await uow.session.delete(webhook)
    await uow.session.flush()
    await uow.audit.record("webhook.delete", _target(webhook), before, None, tenant_id=tenant_id)


async def replay(uow: UnitOfWork, tenant_id: UUID, webhook_id: UUID, delivery_id: UUID) -> DeliveryDocument:
    """Repeat an ended delivery, from now on and with as many attempts as a new one.

    Raises `WebhookNotFound`, `DeliveryNotFound`, `DeliveryPending`.
    """
    delivery = await delivery_row(uow.session, tenant_id, webhook_id, delivery_id, locked=True)
    _require_ended(delivery)
    before, now = {"state": delivery.state}, (await uow.session.scalars(select(func.now()))).one()
    delivery.state, delivery.ended_at, delivery.due_at = "pending", None, now
    delivery.attempts_left, delivery.expires_at = MAX_ATTEMPTS, now + MAX_AGE
    await uow.session.flush()
    path = f"webhooks/{webhook_id}/deliveries/{delivery_id}"
    await uow.audit.record("webhook.replay", path, before, {"state": delivery.state}, tenant_id=tenant_id)
    return DeliveryDocument.model_validate(delivery)


async def discard(uow: UnitOfWork, tenant_id: UUID, webhook_id: UUID, delivery_id: UUID) -> None:
    """Delete an ended delivery: it is neither listed nor repeated from then on. Its event and its deliveries elsewhere stay.

    Raises `WebhookNotFound`, `DeliveryNotFound`, `DeliveryPending`.
    """
    delivery = await delivery_row(uow.session, tenant_id, webhook_id, delivery_id, locked=True)
    _require_ended(delivery)
    before = {"type": delivery.type, "state": delivery.state, "attempts": delivery.attempts}
    await uow.session.delete(delivery)
    await uow.session.flush()
    path = f"webhooks/{webhook_id}/deliveries/{delivery_id}"
    await uow.audit.record("webhook.discard", path, before, None, tenant_id=tenant_id)


def checked_events(events: Sequence[str]) -> list[str]:
    """Return the types without duplicates, in their usual order. Raises `InvalidField`."""
    unknown = [each for each in events if each not in EVENT_TYPES]
    if unknown or not events:
        raise InvalidField("events", f"`events` must be one or more of: {', '.join(EVENT_TYPES)}")
    return [each for each in EVENT_TYPES if each in events]


def _issued(webhook: WebhookEndpoint, secret: str) -> NewWebhookDocument:
    return NewWebhookDocument(**dict(WebhookDocument.model_validate(webhook)), secret=secret)


def _require_ended(delivery: WebhookDelivery) -> None:
    if delivery.state == "pending":
        raise DeliveryPending("the delivery has not ended: it is attempted until it is delivered or dead")


def _snapshot(webhook: WebhookEndpoint) -> dict[str, Any]:
    return {"url": webhook.url, "events": webhook.events}


def _target(webhook: WebhookEndpoint) -> str:
    return f"webhooks/{webhook.id}"
