"""Webhooks: `/console/webhooks`, where events go and what became of each.

Invariant: a secret is in the one response to the form that made it, which no cache keeps.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.form_routes import (
    Sent,
    add_form,
    entered_again,
    revision_of,
    tenant_of,
)
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid, field_errors, parse, read_form
from loraplex.tenants.unit_of_work import UnitOfWork
from loraplex.tenants.webhooks import queries
from loraplex.tenants.webhooks import use_cases as webhooks
from loraplex.tenants.webhooks.encrypted_secrets import WebhookSecrets
from loraplex.tenants.webhooks.queries import delivery_id, webhook_id
from loraplex.tenants.webhooks.use_cases import IssuedWebhook, WebhookRules

LIST: Final = "/console/webhooks"
ONE: Final = f"{LIST}/{{identity}}"
DELIVERY: Final = f"{ONE}/deliveries/{{delivery}}"
READER: Final = "billing:read"
WRITER: Final = "tenant:admin"
HOUR_S: Final = 3600
GRACES: Final = (
    ("0", "None: the old secret stops signing now"),
    (str(HOUR_S), "1 hour"),
    (str(24 * HOUR_S), "24 hours"),
    (str(7 * 24 * HOUR_S), "7 days"),
)
FIELDS: Final = ("url", "events")


class WebhookForm(BaseModel):
    """Where events go, and which."""

    url: str
    events: list[str] = Field(min_length=1)


class RotateForm(BaseModel):
    """`grace`: seconds."""

    grace: int = Field(default=24 * HOUR_S, ge=0, le=webhooks.MAX_GRACE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSecret:
    """A secret that was just made. `is_first`: that of a new endpoint."""

    id: str
    url: str
    is_first: bool
    secret: str = field(repr=False)


def webhooks_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the pages of webhooks."""
    router = APIRouter()
    dependencies = endpoint.dependencies
    rules = WebhookRules(WebhookSecrets(dependencies.derive_key), dependencies.config.webhook_allow_private)
    reader, writer = (Depends(endpoint.requires(scope)) for scope in (READER, WRITER))
    # `new` is no id of a webhook.
    _add_creation(router, endpoint, writer, rules)
    _add_reads(router, endpoint, reader)
    _add_change(router, endpoint, writer, rules)
    _add_rotation(router, endpoint, writer, rules)
    _add_deletion(router, endpoint, writer)
    _add_deliveries(router, endpoint, writer)
    return router


def _add_reads(router: APIRouter, endpoint: ConsoleEndpoint, reader: Any) -> None:
    @router.get(LIST)
    async def list_webhooks(request: Request, session: Annotated[ConsoleSession, reader]) -> Response:
        found = await endpoint.query(
            session, lambda transaction: queries.webhooks(transaction, tenant_of(session))
        )
        return endpoint.page(
            *(request, session, "webhooks/list.html"),
            webhooks=found,
            most=queries.MAX_ENDPOINTS,
            reason=reason_of(session),
        )

    @router.get(f"{LIST}/{{identity}}")
    async def one_webhook(
        identity: str,
        request: Request,
        session: Annotated[ConsoleSession, reader],
        state: str = "",
        before: str = "",
    ) -> Response:
        wanted, path = (state if state in queries.DELIVERY_STATES else None), request.url.path
        webhook = await find_webhook(endpoint, session, identity)
        page = await endpoint.query(
            session,
            lambda found: queries.deliveries(found, tenant_of(session), identity, wanted, before),
        )
        query = {"state": wanted} if wanted else {}
        older = None if page.older is None else f"{path}?{urlencode({**query, 'before': page.older})}"
        return endpoint.page(
            *(request, session, "webhooks/webhook.html"),
            webhook=webhook,
            deliveries=page.rows,
            state=wanted,
            states=queries.DELIVERY_STATES,
            older=older,
            newest=f"{path}?{urlencode(query)}" if before else None,
            attempts=queries.MAX_ATTEMPTS,
            reason=reason_of(session),
        )

    @router.get(DELIVERY)
    async def one_delivery(
        identity: str, delivery: str, request: Request, session: Annotated[ConsoleSession, reader]
    ) -> Response:
        return await show_delivery(endpoint, request, session, identity, delivery)


def _add_creation(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any, rules: WebhookRules) -> None:
    async def create_webhook(sent: Sent) -> Response:
        asked = parse(sent.form, WebhookForm)

        async def work(uow: UnitOfWork) -> NewSecret:
            issued = await webhooks.create(uow, rules, sent.tenant_id, asked.url, asked.events)
            return new_secret(issued, is_first=True)

        made = await sent.perform(work, NewSecret)
        return sent.show_once("webhooks/secret.html", made)

    async def nothing_yet(*_: object) -> dict[str, object]:
        return {}

    add_form(
        *(router, f"{LIST}/new", endpoint),
        access=writer,
        template="webhooks/new.html",
        find=nothing_yet,
        send=create_webhook,
        fields=FIELDS,
        is_page=True,
        events=event_options(),
    )


def _add_change(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any, rules: WebhookRules) -> None:
    async def change_webhook(sent: Sent) -> Response:
        identity, asked = sent.named("identity"), parse(sent.form, WebhookForm)

        async def work(uow: UnitOfWork) -> None:
            await webhooks.change(
                *(uow, rules, sent.tenant_id, webhook_id(identity)),
                url=asked.url,
                events=asked.events,
                seen=revision_of(sent.form),
            )

        await sent.perform(work)
        toast = "The webhook is changed. What waits goes to the new URL."
        return sent.back(f"{LIST}/{identity}", toast)

    add_form(
        *(router, f"{ONE}/edit", endpoint),
        access=writer,
        template="webhooks/edit.html",
        find=asked_about,
        send=change_webhook,
        fields=FIELDS,
        events=event_options(),
    )


def _add_rotation(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any, rules: WebhookRules) -> None:
    async def rotate_secret(sent: Sent) -> Response:
        asked = parse(sent.form, RotateForm)

        async def work(uow: UnitOfWork) -> NewSecret:
            tenant_id, wanted = sent.tenant_id, webhook_id(sent.named("identity"))
            issued = await webhooks.rotate(uow, rules, tenant_id, wanted, asked.grace)
            return new_secret(issued, is_first=False)

        made = await sent.perform(work, NewSecret)
        return sent.show_once("webhooks/secret.html", made)

    add_form(
        *(router, f"{ONE}/rotate", endpoint),
        access=writer,
        template="webhooks/rotate.html",
        find=asked_about,
        send=rotate_secret,
        fields=("grace",),
        graces=GRACES,
    )


def _add_deletion(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def delete_webhook(sent: Sent) -> Response:
        async def work(uow: UnitOfWork) -> None:
            await webhooks.delete(uow, sent.tenant_id, webhook_id(sent.named("identity")))

        await sent.perform(work)
        toast = "The webhook is deleted: it gets no further event."
        return sent.back(LIST, toast)

    add_form(
        *(router, f"{ONE}/delete", endpoint),
        access=writer,
        template="webhooks/delete.html",
        find=asked_about,
        send=delete_webhook,
    )


def _add_deliveries(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    for act, change, toast in (
        ("replay", webhooks.replay, "The event is sent again, with the same id."),
        ("discard", webhooks.discard, "The delivery is discarded. Its event is not sent again."),
    ):
        _add_act(router, endpoint, writer, act, change, toast)


def _add_act(
    router: APIRouter,
    endpoint: ConsoleEndpoint,
    writer: Any,
    act: str,
    change: Callable[[UnitOfWork, UUID, UUID, UUID], Awaitable[object]],
    toast: str,
) -> None:
    @router.post(f"{DELIVERY}/{act}")
    async def change_delivery(
        identity: str,
        delivery: str,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> None:
            await change(uow, tenant_of(session), webhook_id(identity), delivery_id(delivery))

        try:
            with field_errors():
                await endpoint.perform(request, session, form, work)
        except FormInvalid as error:
            shown = entered_again(form, error, ())
            return await show_delivery(endpoint, request, session, identity, delivery, shown)
        return endpoint.back(request, session, f"{LIST}/{identity}", toast)


async def show_delivery(
    endpoint: ConsoleEndpoint,
    request: Request,
    session: ConsoleSession,
    identity: str,
    delivery: str,
    form: Entered | None = None,
) -> Response:
    """Show a delivery with its message; `form`: a refused attempt to send it again or to discard it. Raises `DeliveryNotFound`."""
    webhook = await find_webhook(endpoint, session, identity)
    sent = await endpoint.query(
        session, lambda found: queries.sent_event(found, tenant_of(session), identity, delivery)
    )
    return endpoint.page(
        *(request, session, "webhooks/delivery.html"),
        status=200 if form is None else 422,
        webhook=webhook,
        sent=sent,
        delivery=sent.delivery,
        attempts=queries.MAX_ATTEMPTS,
        form=form,
        reason=reason_of(session),
    )


async def find_webhook(endpoint: ConsoleEndpoint, session: ConsoleSession, identity: str) -> queries.Webhook:
    """Return a webhook of the session's tenant. Raises `WebhookNotFound`."""
    return await endpoint.query(session, lambda found: queries.webhook(found, tenant_of(session), identity))


async def asked_about(
    endpoint: ConsoleEndpoint, request: Request, session: ConsoleSession
) -> dict[str, object]:
    """Return what forms about a webhook show. Raises `WebhookNotFound`."""
    return {"webhook": await find_webhook(endpoint, session, request.path_params["identity"])}


def new_secret(issued: IssuedWebhook, *, is_first: bool) -> NewSecret:
    """Return what is shown once of a new secret."""
    return NewSecret(id=str(issued.record.id), url=issued.record.url, is_first=is_first, secret=issued.secret)


def event_options() -> list[tuple[str, str, str]]:
    """Return all types of events as choices."""
    return [(each, each, "") for each in queries.EVENT_TYPES]


def reason_of(session: ConsoleSession) -> str:
    """Return why the person may not change webhooks; "" where the person may."""
    return "" if WRITER in session.scopes else f"Needs the scope {WRITER}, which your role has not."
