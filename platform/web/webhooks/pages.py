"""Webhooks: `/console/webhooks`, where events go and what became of each.

Invariant: a secret is in the one response to the form that made it, which no cache keeps.
"""

from typing import Annotated, Final

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import Response

from loraplex.platform.web.console.form_routes import FormSubmission, form_page, form_post, submits
from loraplex.platform.web.console.forms import Entered
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
        counts = await queries.open_deliveries(session, page.tenant_id)
    return {"webhook": webhook, "open_count": counts[webhook_id], "events": EVENTS, "graces": GRACES}


# `new` is no id of a webhook.
@form_page(router, f"{LIST}/new", "webhooks/new.html", new_form, fields=FIELDS, is_page=True)
async def create_webhook(submission: Submission) -> Response:
    values, rules = submission.parse(WebhookForm), submission.dependencies.webhook_rules
    made = await submission.result(use_cases.create, submission.tenant_id, rules, values.url, values.events)
    return _show_once(submission, made)


@router.get(LIST)
async def list_webhooks(page: Reader) -> Response:
    async with page.reading() as session:
        webhooks = await queries.webhooks(session, page.tenant_id)
        counts = await queries.open_deliveries(session, page.tenant_id)
    return page.show(
        "webhooks/list.html",
        webhooks=webhooks,
        open_counts=counts,
        most=MAX_WEBHOOKS,
        reason=page.lacks(TENANT_ADMIN),
    )


@router.get(ONE)
async def show_webhook(page: Reader, webhook_id: WebhookId, state: str = "") -> Response:
    wanted, part = (state if state in DELIVERY_STATES else None), page.part(BY_CREATION)
    async with page.reading() as session:
        webhook = await queries.webhook(session, page.tenant_id, webhook_id)
        found = await queries.deliveries(session, page.tenant_id, webhook_id, wanted, part)
    return page.show(
        "webhooks/webhook.html",
        webhook=webhook,
        deliveries=page.rows(part, found),
        state=wanted,
        states=DELIVERY_STATES,
        attempts=MAX_ATTEMPTS,
        reason=page.lacks(TENANT_ADMIN),
    )


@form_page(router, f"{ONE}/edit", "webhooks/edit.html", webhook_form, fields=FIELDS)
async def change_webhook(submission: Submission, webhook_id: WebhookId) -> Response:
    values, rules = submission.parse(WebhookForm), submission.dependencies.webhook_rules
    await submission.run(
        use_cases.change,
        submission.tenant_id,
        webhook_id,
        rules,
        url=values.url,
        events=values.events,
        seen=submission.revision,
    )
    return submission.back(f"{LIST}/{webhook_id}", "The webhook is changed. What waits goes to the new URL.")


@form_page(router, f"{ONE}/rotate", "webhooks/rotate.html", webhook_form, fields=("grace",))
async def rotate_secret(submission: Submission, webhook_id: WebhookId) -> Response:
    values, rules = submission.parse(RotateForm), submission.dependencies.webhook_rules
    return _show_once(
        submission,
        await submission.result(use_cases.rotate, submission.tenant_id, webhook_id, rules, values.grace),
    )


@form_page(router, f"{ONE}/delete", "webhooks/delete.html", webhook_form)
async def delete_webhook(submission: Submission, webhook_id: WebhookId) -> Response:
    await submission.run(use_cases.delete, submission.tenant_id, webhook_id)
    return submission.back(LIST, "The webhook is deleted: it gets no further event.")


@router.get(DELIVERY)
async def show_delivery(page: Reader, webhook_id: WebhookId, delivery_id: DeliveryId) -> Response:
    return await _show_delivery(page, None, webhook_id, delivery_id)


async def _show_delivery(
    page: PageRequest, refused: Entered | None, webhook_id: WebhookId, delivery_id: DeliveryId
) -> Response:
    """Show a delivery with its message; `refused`: an attempt to send it again or to discard it. Raises `DeliveryNotFound`."""
    async with page.reading() as session:
        webhook = await queries.webhook(session, page.tenant_id, webhook_id)
        sent = await queries.sent_event(session, page.tenant_id, webhook_id, delivery_id)
    return page.show(
        "webhooks/delivery.html",
        webhook=webhook,
        sent=sent,
        attempts=MAX_ATTEMPTS,
        form=refused,
        reason=page.lacks(TENANT_ADMIN),
    )


@form_post(router, f"{DELIVERY}/replay", _show_delivery, fields=())
async def replay_delivery(submission: Submission, webhook_id: WebhookId, delivery_id: DeliveryId) -> Response:
    await submission.run(use_cases.replay, submission.tenant_id, webhook_id, delivery_id)
    return submission.back(f"{LIST}/{webhook_id}", "The event is sent again, with the same id.")


@form_post(router, f"{DELIVERY}/discard", _show_delivery, fields=())
async def discard_delivery(
    submission: Submission, webhook_id: WebhookId, delivery_id: DeliveryId
) -> Response:
    await submission.run(use_cases.discard, submission.tenant_id, webhook_id, delivery_id)
    return submission.back(f"{LIST}/{webhook_id}", "The delivery is discarded. Its event is not sent again.")


def _show_once(submission: FormSubmission, made: NewWebhookDocument) -> Response:
    """Show a new secret, in a dialog where htmx asked for it: then no reload of the page sends the form again."""
    return submission.dialog("webhooks/secret.html", made=made)
