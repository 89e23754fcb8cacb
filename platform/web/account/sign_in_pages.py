"""Signing in and out of both areas, and the switch of the tenant: `/console/sign-in`, `/operator/console/sign-in`."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.people.errors import (
    LinkNotValid,
    SecondFactorNeeded,
    SignInRefused,
    SignInSlowed,
)
from loraplex.platform.services.people.own_account import protection
from loraplex.platform.services.people.recovery_codes import recovery_code
from loraplex.platform.services.people.sessions import end_session, switch_tenant
from loraplex.platform.services.people.sign_in import SignedIn, find_link, sign_in, use_link
from loraplex.platform.services.people.sign_up import is_open
from loraplex.platform.web.account.link_pages import LinkPages
from loraplex.platform.web.account.sign_in_tickets import Pair, SignInTickets
from loraplex.platform.web.console.cookies import area_of
from loraplex.platform.web.console.endpoint import (
    FIRST_PAGE,
    ConsoleEndpoint,
    SignInNeeded,
    page_within,
    redirect,
)
from loraplex.platform.web.console.error_pages import USED_UP
from loraplex.platform.web.console.forms import Entered, Form, parse, read_form, read_open_form
from loraplex.tenants.unit_of_work import UnitOfWork

OPEN_FORM = Depends(read_open_form)
FORM = Depends(read_form)


class TenantChoice(BaseModel):
    """The tenant to switch to."""

    tenant_id: UUID


def sign_in_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of signing in and out."""
    router = APIRouter()
    pages = SignInPages(endpoint)
    for first in FIRST_PAGE.values():
        router.add_api_route(f"{first}/sign-in", pages.show, methods=["GET"], response_model=None)
        router.add_api_route(f"{first}/sign-in", pages.submit, methods=["POST"], response_model=None)
        router.add_api_route(f"{first}/sign-out", pages.sign_out, methods=["POST"], response_model=None)
    router.add_api_route("/console/switch-tenant", pages.switch_tenant, methods=["POST"], response_model=None)
    return router


class SignInPages:
    """The pages of signing in, the same for both areas."""

    def __init__(self, endpoint: ConsoleEndpoint) -> None:
        self._endpoint = endpoint
        self._tickets = SignInTickets(endpoint.dependencies.derive_key)

    async def show(self, request: Request, token: str = "", next: str = "") -> Response:
        """Show the form; a link's token signs in by itself, or leads on to what the link is for."""
        if token:
            return await self._by_link(request, token)
        if await self._endpoint.session(request) is not None:
            return redirect(request, page_within(area_of(request), next))
        links, database = self._endpoint.dependencies.mailed_links, self._endpoint.dependencies.database
        signs_up = links is not None and await is_open(database)
        return self._form(request, Entered({"next": next}), signs_up=signs_up)

    async def submit(self, request: Request, form: Annotated[Form, OPEN_FORM]) -> Response:
        """Check the pair and, in a second step, the code."""
        pair = self._tickets.open(form.text("ticket"))
        typed = pair or Pair(form.text("email"), form.fields.get("password", ""))
        try:
            signed_in = await self._sign_in(request, typed, form.text("code") or None)
        except SecondFactorNeeded:
            return self._code(request, form, typed, {})
        except SignInRefused as error:
            if pair is not None:
                return self._code(request, form, typed, {"code": str(error)}, status=422)
            return self._form(request, form.entered({"password": str(error)}), status=422)
        except SignInSlowed as error:
            response = self._form(request, form.entered({"": _slowed(error.retry_after_s)}), status=429)
            response.headers["retry-after"] = str(error.retry_after_s)
            return response
        response = self._endpoint.enter(request, signed_in, form.text("next"))
        if recovery_code(form.text("code")) is not None:
            left = (await protection(self._endpoint.dependencies.database, signed_in.session)).recovery_codes
            text = f"You signed in with a recovery code; {left} {'is' if left == 1 else 'are'} left."
            self._endpoint.cookies.leave_toast(request, response, text)
        return response

    async def sign_out(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """End the session."""
        session = await self._endpoint.session(request)
        if session is None:
            raise SignInNeeded

        async def work(uow: UnitOfWork) -> None:
            await end_session(uow, session)

        await self._endpoint.perform_own(request, session, work)
        area = area_of(request)
        left = "/operator/console" if session.viewing_as_operator else f"{FIRST_PAGE[area]}/sign-in"
        response = redirect(request, left)
        self._endpoint.cookies.end_session(request, response, area)
        return response

    async def switch_tenant(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Go on in another tenant of the person, with a new token."""
        session = await self._endpoint.session(request)
        if session is None:
            raise SignInNeeded
        chosen = parse(form, TenantChoice).tenant_id

        async def work(uow: UnitOfWork) -> str:
            return await switch_tenant(uow, session, chosen)

        token = await self._endpoint.perform_own(request, session, work)
        response = self._endpoint.back(
            request, session, "/console", f"You are in {dict(session.tenants)[chosen]} now."
        )
        self._endpoint.cookies.start_session(request, response, "tenant", token)
        return response

    async def _by_link(self, request: Request, token: str) -> Response:
        dependencies = self._endpoint.dependencies
        address, agent = dependencies.addresses.of(request), request.headers.get("user-agent")
        try:
            if (await find_link(dependencies.database, token)).purpose != "demo":
                return await LinkPages(self._endpoint).show(request, token)
            return self._endpoint.enter(request, await use_link(dependencies.database, token, address, agent))
        except LinkNotValid:
            return self._form(request, Entered(errors={"": USED_UP}), status=404)

    async def _sign_in(self, request: Request, pair: Pair, code: str | None) -> SignedIn:
        dependencies = self._endpoint.dependencies
        return await sign_in(
            *(dependencies.database, pair.email, pair.password, code, dependencies.addresses.of(request)),
            request.headers.get("user-agent"),
            derive_key=dependencies.derive_key,
            area="operator" if area_of(request) == "operator" else None,
        )

    def _form(
        self, request: Request, form: Entered, *, status: int = 200, signs_up: bool = False
    ) -> Response:
        template = "account/sign_in.html"
        return self._endpoint.page(request, None, template, status=status, form=form, signs_up=signs_up)

    def _code(
        self, request: Request, form: Form, pair: Pair, errors: dict[str, str], *, status: int = 200
    ) -> Response:
        return self._endpoint.page(
            request,
            None,
            "account/code.html",
            status=status,
            form=Entered({"next": form.text("next")}, errors=errors),
            ticket=self._tickets.seal(pair),
        )


def _slowed(seconds: int) -> str:
    return f"There were too many failed sign-ins. The next one is possible in {seconds} s."
