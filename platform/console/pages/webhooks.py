"""Webhooks: `/console/billing/webhooks`. Invariant: a secret is in the response to its creation or rotation and nowhere else."""

from dataclasses import dataclass
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.console.endpoint import ConsoleEndpoint
from loraplex.platform.console.forms import Entered, Form, FormInvalid, field_errors, parse, read_form
from loraplex.platform.services import webhooks as use_cases
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.queries import webhooks
from loraplex.platform.services.unit_of_work import UnitOfWork
from loraplex.platform.services.webhook_secrets import WebhookSecrets

PATH: Final = "/console/billing/webhooks"
READ: Final = "billing:read"
WRITE: Final = "tenant:admin"
EVENT_OPTIONS: Final = [(name, name, "") for name in webhooks.EVENT_TYPES]
GRACE_S: Final = 24 * 3600
SentForm = Annotated[Form, Depends(read_form)]


@dataclass(frozen=True, slots=True)
class Issued:
    """An endpoint with a new secret."""

    id: UUID
    url: str
    secret: str


class WebhookForm(BaseModel):
    """An address and the events that it receives."""

    url: Annotated[str, Field(max_length=webhooks.MAX_URL_LENGTH)]
    events: list[str]


class ChangedWebhookForm(WebhookForm):
    """The same for an endpoint that exists. `revision`: what the author of the change has read."""

    revision: int


def webhooks_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of webhooks."""
    router = APIRouter()
    dependencies = endpoint.dependencies
    secrets = WebhookSecrets(dependencies.derive_key)
    rules = use_cases.WebhookRules(secrets, dependencies.config.webhook_allow_private)
    reader, admin = Depends(endpoint.requires(READ)), Depends(endpoint.requires(WRITE))
    _add_reads(router, endpoint, reader)
    _add_issuing(router, endpoint, admin, rules)
    _add_changes(router, endpoint, admin, rules)
    return router


def _add_reads(router: APIRouter, endpoint: ConsoleEndpoint, reader: object) -> None:
    @router.get(PATH)
    async def list_webhooks(request: Request, session: Annotated[ConsoleSession, reader]) -> Response:
        return await _list(endpoint, request, session, None)

    @router.get(f"{PATH}/{{webhook_id}}")
    async def show_webhook(
        webhook_id: str, request: Request, session: Annotated[ConsoleSession, reader]
    ) -> Response:
        return await _detail(endpoint, request, session, webhooks.webhook_id_of(webhook_id))


def _add_issuing(
    router: APIRouter, endpoint: ConsoleEndpoint, admin: object, rules: use_cases.WebhookRules
) -> None:
    @router.post(PATH)
    async def create_webhook(
        request: Request, session: Annotated[ConsoleSession, admin], form: SentForm
    ) -> Response:
        async def create(uow: UnitOfWork) -> Issued:
            made = await use_cases.create(uow, rules, tenant_of(session), values.url, values.events)
            return Issued(made.record.id, made.record.url, made.secret)

        try:
            values = parse(form, WebhookForm)
            with field_errors():
                issued = await endpoint.perform(request, session, form, create, Issued)
        except FormInvalid as invalid:
            return await _list(endpoint, request, session, form.entered(invalid.errors))
        return endpoint.page(request, session, "billing/webhook_secret.html", issued=issued, grace=False)

    @router.post(f"{PATH}/{{webhook_id}}/rotate")
    async def rotate_secret(
        webhook_id: str, request: Request, session: Annotated[ConsoleSession, admin], form: SentForm
    ) -> Response:
        identity = webhooks.webhook_id_of(webhook_id)

        async def rotate(uow: UnitOfWork) -> Issued:
            made = await use_cases.rotate(uow, rules, tenant_of(session), identity, GRACE_S)
            return Issued(made.record.id, made.record.url, made.secret)

        issued = await endpoint.perform(request, session, form, rotate, Issued)
        return endpoint.page(request, session, "billing/webhook_secret.html", issued=issued, grace=True)


def _add_changes(
    router: APIRouter, endpoint: ConsoleEndpoint, admin: object, rules: use_cases.WebhookRules
) -> None:
    @router.post(f"{PATH}/{{webhook_id}}/change")
    async def change_webhook(
        webhook_id: str, request: Request, session: Annotated[ConsoleSession, admin], form: SentForm
    ) -> Response:
        identity = webhooks.webhook_id_of(webhook_id)

        async def change(uow: UnitOfWork) -> None:
            await use_cases.change(
                uow,
                rules,
                tenant_of(session),
                identity,
                url=values.url,
                events=values.events,
                seen=values.revision,
            )

        try:
            values = parse(form, ChangedWebhookForm)
            with field_errors():
                await endpoint.perform(request, session, form, change)
        except FormInvalid as invalid:
            return await _detail(endpoint, request, session, identity, form.entered(invalid.errors))
        return endpoint.back(
            request, session, f"{PATH}/{identity}", "Deliveries that wait go to this address."
        )

    @router.post(f"{PATH}/{{webhook_id}}/delete")
    async def delete_webhook(
        webhook_id: str, request: Request, session: Annotated[ConsoleSession, admin], form: SentForm
    ) -> Response:
        identity = webhooks.webhook_id_of(webhook_id)
        await endpoint.perform(
            request, session, form, lambda uow: use_cases.delete(uow, tenant_of(session), identity)
        )
        return endpoint.back(request, session, PATH, "The webhook and its deliveries are deleted.")

    @router.post(f"{PATH}/{{webhook_id}}/deliveries/{{delivery_id}}")
    async def send_again(
        webhook_id: str,
        delivery_id: UUID,
        request: Request,
        session: Annotated[ConsoleSession, admin],
        form: SentForm,
    ) -> Response:
        identity = webhooks.webhook_id_of(webhook_id)
        await endpoint.perform(
            request,
            session,
            form,
            lambda uow: use_cases.replay(uow, tenant_of(session), identity, delivery_id),
        )
        return endpoint.back(request, session, f"{PATH}/{identity}", "It is sent again now.")


def tenant_of(session: ConsoleSession) -> UUID:
    """Return the tenant of a session of the tenant area."""
    assert session.tenant_id is not None, "a session of the tenant area has a tenant"
    return session.tenant_id


async def _list(
    endpoint: ConsoleEndpoint, request: Request, session: ConsoleSession, form: Entered | None
) -> Response:
    rows = await endpoint.query(session, lambda found: webhooks.webhooks(found, tenant_of(session)))
    return endpoint.page(
        request,
        session,
        "billing/webhooks.html",
        status=200 if form is None else 422,
        rows=rows,
        form=form,
        event_options=EVENT_OPTIONS,
        may_change=WRITE in session.scopes,
    )


async def _detail(
    endpoint: ConsoleEndpoint,
    request: Request,
    session: ConsoleSession,
    identity: UUID,
    form: Entered | None = None,
) -> Response:
    given = request.query_params.get("state", "")
    state = given if given in webhooks.DELIVERY_STATES else None
    found = await endpoint.query(
        session, lambda opened: webhooks.webhook(opened, tenant_of(session), identity, state)
    )
    stored = Entered(
        {"url": found.row.url, "revision": str(found.row.revision)}, {"events": found.row.events}
    )
    return endpoint.page(
        request,
        session,
        "billing/webhook.html",
        status=200 if form is None else 422,
        webhook=found.row,
        deliveries=found.deliveries,
        filter=Entered({"state": state or ""}),
        states=webhooks.DELIVERY_STATES,
        form=form or stored,
        address=f"{PATH}/{identity}",
        event_options=EVENT_OPTIONS,
        may_change=WRITE in session.scopes,
    )
