"""What stops, starts and ends a tenant, and an operator's look into it: confirmed by a page, and by the typed name for what is final."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services import tenants as use_cases
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.people.sessions import view_as_operator
from loraplex.platform.web.console.confirmation import Confirmation
from loraplex.platform.web.console.endpoint import ConsoleEndpoint, redirect
from loraplex.platform.web.console.forms import FormInvalid, field_errors
from loraplex.platform.web.tenants import queries as tenants
from loraplex.platform.web.tenants.operator_pages import LIST, PATH, SentForm

TENANT_AREA: Final = "/console"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One of the steps in a tenant's life. Its texts get the tenant's name for `{name}`. `ends_running`: the use case is told
    whether running requests end.
    """

    use_case: Callable[..., Awaitable[object]]
    title: str
    consequence: str
    verb: str
    keep: str
    fact: str
    asks_name: bool = False
    ends_running: bool = False
    leads_to_list: bool = False


STEPS: Final = {
    "suspend": Step(
        use_case=use_cases.suspend,
        title="Suspend {name}?",
        consequence="Its next request is refused with 403, on every gateway, and its people are signed out. Adapters, keys"
        " and limits stay; resuming brings everything back.",
        verb="Suspend tenant",
        keep="Keep it active",
        fact="{name} is suspended.",
        ends_running=True,
    ),
    "resume": Step(
        use_case=use_cases.resume,
        title="Resume {name}?",
        consequence="Its keys work again from the next request on.",
        verb="Resume tenant",
        keep="Keep it suspended",
        fact="{name} is active again.",
    ),
    "delete": Step(
        use_case=use_cases.delete,
        title="Delete {name}?",
        consequence="Its next request is refused with 401, on every gateway, and those that run end. Its keys, adapters and"
        " people’s access are erased in the background, and cannot be brought back. Usage figures and invoices stay.",
        verb="Delete tenant",
        keep="Keep it",
        fact="{name} is deleted; its data is being erased.",
        asks_name=True,
        leads_to_list=True,
    ),
}


def tenant_state_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the steps, and of looking into a tenant."""
    router = APIRouter()
    operator = Depends(endpoint.requires_operator())
    for name, step in STEPS.items():
        _add_step(router, endpoint, operator, name, step)

    @router.post(f"{PATH}/{{tenant_id}}/look")
    async def look_as_tenant(
        tenant_id: str, request: Request, session: Annotated[ConsoleSession, operator], form: SentForm
    ) -> Response:
        identity = tenants.tenant_id_of(tenant_id)
        token = await endpoint.perform_own(
            request, session, lambda uow: view_as_operator(uow, session, identity)
        )
        response = redirect(request, TENANT_AREA)
        endpoint.cookies.start_session(request, response, "tenant", token)
        return response

    return router


def _add_step(router: APIRouter, endpoint: ConsoleEndpoint, operator: object, name: str, step: Step) -> None:
    async def asked(session: ConsoleSession, tenant_id: str) -> tuple[Confirmation, str]:
        """Return what is asked, and the tenant's name."""
        identity, now = tenants.tenant_id_of(tenant_id), datetime.now(UTC)
        detail = await endpoint.query(session, lambda found: tenants.tenant(found, identity, now))
        tenant = detail.row.name
        confirmation = Confirmation(
            title=step.title.format(name=tenant),
            consequence=step.consequence,
            action=f"{PATH}/{identity}/{name}",
            verb=step.verb,
            keep=step.keep,
            back=f"{PATH}/{identity}",
            path=f"/tenants/{identity}" if step.asks_name else f"/tenants/{identity}/{name}",
            method="DELETE" if step.asks_name else "POST",
            typed=tenant if step.asks_name else None,
            ends_running=step.ends_running,
        )
        return confirmation, tenant

    @router.get(f"{PATH}/{{tenant_id}}/{name}", name=f"ask_{name}")
    async def ask(tenant_id: str, request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        confirmation, _ = await asked(session, tenant_id)
        return endpoint.page(request, session, "tenants/confirm.html", **confirmation.context())

    @router.post(f"{PATH}/{{tenant_id}}/{name}", name=f"{name}_tenant")
    async def do(
        tenant_id: str, request: Request, session: Annotated[ConsoleSession, operator], form: SentForm
    ) -> Response:
        confirmation, tenant = await asked(session, tenant_id)
        identity = tenants.tenant_id_of(tenant_id)
        chosen = {"end_running": bool(form.text("end_running"))} if step.ends_running else {}
        try:
            confirmation.require(form)
            with field_errors():
                await endpoint.perform(
                    request, session, form, lambda uow: step.use_case(uow, identity, **chosen)
                )
        except FormInvalid as invalid:
            context = confirmation.context(form.entered(invalid.errors))
            return endpoint.page(request, session, "tenants/confirm.html", status=422, **context)
        location = LIST if step.leads_to_list else confirmation.back
        return endpoint.back(request, session, location, step.fact.format(name=tenant))
