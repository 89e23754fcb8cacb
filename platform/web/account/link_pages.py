"""What links that work once lead to: an invitation that is accepted, a password that is set.

Invariant: opening a link changes nothing; only the form on its page uses it up.
"""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.people.errors import LinkNotValid, SecondFactorNeeded
from loraplex.platform.services.people.invitations import Acceptance, accept_invitation
from loraplex.platform.services.people.passwords import reset_password
from loraplex.platform.services.people.sign_in import find_link
from loraplex.platform.web.console.cookies import area_of
from loraplex.platform.web.console.endpoint import FIRST_PAGE, ConsoleEndpoint, redirect
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid, field_errors, read_open_form

TEMPLATES = {
    "member": "account/accept.html",
    "operator": "account/accept.html",
    "sign_up": "account/accept.html",
    "reset": "account/reset.html",
}
FORM = Depends(read_open_form)
NOTHING_TYPED = Entered()


def links_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the forms that use links up."""
    router = APIRouter()
    links = LinkPages(endpoint)
    for first in FIRST_PAGE.values():
        router.add_api_route(f"{first}/accept", links.accept, methods=["POST"], response_model=None)
        router.add_api_route(f"{first}/reset-password", links.reset, methods=["POST"], response_model=None)
    return router


@dataclass(frozen=True, slots=True)
class LinkPages:
    """The pages of links."""

    endpoint: ConsoleEndpoint

    async def show(
        self, request: Request, token: str, form: Entered = NOTHING_TYPED, *, status: int = 200
    ) -> Response:
        """Show the form of an invitation or a reset. Raises `LinkNotValid`."""
        link = await find_link(self.endpoint.dependencies.database, token)
        template = TEMPLATES.get(link.purpose)
        if template is None:
            raise LinkNotValid("this link has no form")
        return self.endpoint.page(request, None, template, status=status, link=link, token=token, form=form)

    async def accept(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Accept an invitation, and sign in."""
        dependencies, token = self.endpoint.dependencies, form.text("token")
        entered = Acceptance(
            password=form.fields.get("password", ""),
            name=form.text("name"),
            email=form.text("email"),
            code=form.text("code") or None,
            tenant_name=form.text("tenant_name"),
        )
        address, agent = dependencies.addresses.of(request), request.headers.get("user-agent")
        try:
            with field_errors():
                signed_in = await accept_invitation(
                    *(dependencies.database, token, entered, address, agent),
                    derive_key=dependencies.derive_key,
                )
        except SecondFactorNeeded as error:
            return await self._again(request, form, {"code": str(error)})
        except FormInvalid as error:
            return await self._again(request, form, error.errors)
        return self.endpoint.enter(request, signed_in)

    async def reset(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Set a new password; the person then signs in with it."""
        dependencies = self.endpoint.dependencies
        address = dependencies.addresses.of(request)
        password = form.fields.get("password", "")
        try:
            with field_errors():
                email = await reset_password(
                    *(dependencies.database, form.text("token"), password),
                    address=address,
                    publisher=dependencies.policy_publisher,
                )
        except FormInvalid as error:
            return await self._again(request, form, error.errors)
        response = redirect(request, f"{FIRST_PAGE[area_of(request)]}/sign-in")
        self.endpoint.cookies.leave_toast(request, response, f"{email} has a new password. Sign in with it.")
        return response

    async def _again(self, request: Request, form: Form, errors: dict[str, str]) -> Response:
        return await self.show(request, form.text("token"), form.entered(errors), status=422)
