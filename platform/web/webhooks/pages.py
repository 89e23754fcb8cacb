"""Webhooks: `/console/webhooks`, where events go and what became of each.

Invariant: a secret is in the one response to the form that made it, which no cache keeps.
"""

from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import Response

from loraplex.platform.web.console.form_routes import FormSubmission, entered_again, form, submits
from loraplex.platform.web.console.forms import Entered, FormInvalid, field_errors
from loraplex.platform.web.console.page import PageRequest, opens
from loraplex.platform.web.sorting import BY_CREATION
from loraplex.platform.web.webhooks.routes import DeliveryId, WebhookId
from loraplex.tenants.scopes import BILLING_READ, TENANT_ADMIN
from loraplex.tenants.webhooks import queries, use_cases
from loraplex.tenants.webhooks.records import (
    DELIVERY_STATES,
    EVENT_TYPES,
    MAX_ATTEMPTS,
    MAX_GRACE_S,
    MAX_WEBHOOKS,
    NewWebhookDocument,
)

Reader = Annotated[PageRequest, opens(BILLING_READ)]
Writer = Annotated[PageRequest, opens(TENANT_ADMIN)]
Submission = Annotated[FormSubmission, submits(TENANT_ADMIN)]
LIST: Final = "/console/webhooks"
ONE: Final = f"{LIST}/{{webhook_id}}"
DELIVERY: Final = f"{ONE}/deliveries/{{delivery_id}}"
HOUR_S: Final = 3600
GRACES: Final = (
    ("0", "None: the old secret stops signing now"),
    (str(HOUR_S), "1 hour"),
    (str(24 * HOUR_S), "24 hours"),
    (str(7 * 24 * HOUR_S), "7 days"),
)
FIELDS: Final = ("url", "events")
EVENTS: Final = [(each, each, "") for each in EVENT_TYPES]

router = APIRouter()


class WebhookForm(BaseModel):
    """Where events go, and which."""

    url: str
    events: list[str] = Field(min_length=1)


class RotateForm(BaseModel):
    """`grace`: seconds."""

    grace: int = Field(default=24 * HOUR_S, ge=0, le=MAX_GRACE_S)


async def new_form(page: Writer) -> dict[str, object]:
    """Return what the form of a new webhook shows."""
    return {"events": EVENTS}


async def webhook_form(page: Writer, webhook_id: WebhookId) -> dict[str, object]:
    """Return what the forms about a webhook show. Raises `WebhookNotFound`."""
    async with page.reading() as session:
        webhook = await queries.webhook(session, page.tenant_id, webhook_id)
        open = (await queries.open_deliveries(session, page.tenant_id))[webhook_id]
    return {"webhook": webhook, "open": open, "events": EVENTS, "graces": GRACES}


# `new` is no id of a webhook.
@form(router, f"{LIST}/new", "webhooks/new.html", new_form, fields=FIELDS, is_page=True)
async def create_webhook(sent: Submission) -> Response:
    asked, rules = sent.parse(WebhookForm), sent.dependencies.webhook_rules
    made = await sent.run(use_cases.create, sent.tenant_id, rules, asked.url, asked.events)
    return _show_once(sent, made)


@router.get(LIST)
async def list_webhooks(page: Reader) -> Response:
    async with page.reading() as session:
        webhooks = await queries.webhooks(session, page.tenant_id)
        open = await queries.open_deliveries(session, page.tenant_id)
    return page.show(
        "webhooks/list.html",
        webhooks=webhooks,
        open=open,
        most=MAX_WEBHOOKS,
        reason=page.lacks(TENANT_ADMIN),
    )


@router.get(ONE)
async def show_webhook(page: Reader, webhook_id: WebhookId, state: str = "", before: str = "") -> Response:
    wanted, path = (state if state in DELIVERY_STATES else None), page.http.url.path
    part, query = page.part(BY_CREATION, "before"), {"state": wanted} if wanted else {}
    async with page.reading() as session:
        webhook = await queries.webhook(session, page.tenant_id, webhook_id)
        found = await queries.deliveries(session, page.tenant_id, webhook_id, wanted, part)
    rows, older = part.cut(found)
    return page.show(
        "webhooks/webhook.html",
        webhook=webhook,
        deliveries=rows,
        state=wanted,
        states=DELIVERY_STATES,
        older=None if older is None else f"{path}?{urlencode({**query, 'before': older})}",
        newest=f"{path}?{urlencode(query)}" if before else None,
        attempts=MAX_ATTEMPTS,
        reason=page.lacks(TENANT_ADMIN),
    )


@form(router, f"{ONE}/edit", "webhooks/edit.html", webhook_form, fields=FIELDS)
async def change_webhook(sent: Submission, webhook_id: WebhookId) -> Response:
    asked, rules = sent.parse(WebhookForm), sent.dependencies.webhook_rules
    given: dict[str, Any] = {"url": asked.url, "events": asked.events, "seen": sent.revision}
    await sent.run(use_cases.change, sent.tenant_id, webhook_id, rules, **given)
    return sent.back(f"{LIST}/{webhook_id}", "The webhook is changed. What waits goes to the new URL.")


@form(router, f"{ONE}/rotate", "webhooks/rotate.html", webhook_form, fields=("grace",))
async def rotate_secret(sent: Submission, webhook_id: WebhookId) -> Response:
    asked, rules = sent.parse(RotateForm), sent.dependencies.webhook_rules
    return _show_once(sent, await sent.run(use_cases.rotate, sent.tenant_id, webhook_id, rules, asked.grace))


@form(router, f"{ONE}/delete", "webhooks/delete.html", webhook_form)
async def delete_webhook(sent: Submission, webhook_id: WebhookId) -> Response:
    await sent.run(use_cases.delete, sent.tenant_id, webhook_id)
    return sent.back(LIST, "The webhook is deleted: it gets no further event.")


@router.get(DELIVERY)
async def show_delivery(page: Reader, webhook_id: WebhookId, delivery_id: DeliveryId) -> Response:
    return await _show_delivery(page, webhook_id, delivery_id)


@router.post(f"{DELIVERY}/replay")
async def replay_delivery(sent: Submission, webhook_id: WebhookId, delivery_id: DeliveryId) -> Response:
    try:
        with field_errors():
            await sent.run(use_cases.replay, sent.tenant_id, webhook_id, delivery_id)
    except FormInvalid as error:
        return await _show_delivery(sent, webhook_id, delivery_id, entered_again(sent.form, error, ()))
    return sent.back(f"{LIST}/{webhook_id}", "The event is sent again, with the same id.")


@router.post(f"{DELIVERY}/discard")
async def discard_delivery(sent: Submission, webhook_id: WebhookId, delivery_id: DeliveryId) -> Response:
    try:
        with field_errors():
            await sent.run(use_cases.discard, sent.tenant_id, webhook_id, delivery_id)
    except FormInvalid as error:
        return await _show_delivery(sent, webhook_id, delivery_id, entered_again(sent.form, error, ()))
    return sent.back(f"{LIST}/{webhook_id}", "The delivery is discarded. Its event is not sent again.")


async def _show_delivery(
    page: PageRequest, webhook_id: WebhookId, delivery_id: DeliveryId, refused: Entered | None = None
) -> Response:
    """Show a delivery with its message; `refused`: an attempt to send it again or to discard it. Raises `DeliveryNotFound`."""
    async with page.reading() as session:
        webhook = await queries.webhook(session, page.tenant_id, webhook_id)
        sent = await queries.sent_event(session, page.tenant_id, webhook_id, delivery_id)
    return page.show(
        "webhooks/delivery.html",
        status=200 if refused is None else 422,
        webhook=webhook,
        sent=sent,
        attempts=MAX_ATTEMPTS,
        form=refused,
        reason=page.lacks(TENANT_ADMIN),
    )


def _show_once(sent: FormSubmission, made: NewWebhookDocument) -> Response:
    """Show a new secret, in a dialog where htmx asked for it: then no reload of the page sends the form again."""
    return sent.question("webhooks/secret.html", made=made)
