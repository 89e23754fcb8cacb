"""Asking for a link by mail: a forgotten password, and a tenant of one's own. Only where a mail server is set."""

from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Depends
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.people import sign_up
from loraplex.platform.services.people.errors import SignInSlowed
from loraplex.platform.services.people.mailed_links import MailedLinks
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid, field_errors, read_open_form

FORM = Depends(read_open_form)
PASSWORD: Final = "/console/forgot-password"
SIGN_UP: Final = "/console/sign-up"


def mailed_links_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes; without a mail server there are none."""
    router, links = APIRouter(), endpoint.dependencies.mailed_links
    if links is not None:
        pages = MailedLinkPages(endpoint, links)
        for path, show, submit in (
            (PASSWORD, pages.show_password, pages.mail_password),
            (SIGN_UP, pages.show_sign_up, pages.mail_sign_up),
        ):
            router.add_api_route(path, show, methods=["GET"], response_model=None)
            router.add_api_route(path, submit, methods=["POST"], response_model=None)
    return router


@dataclass(frozen=True, slots=True)
class MailedLinkPages:
    """Both forms. What is answered does not depend on the address."""

    endpoint: ConsoleEndpoint
    links: MailedLinks

    async def show_password(self, request: Request) -> Response:
        """Show the form of a forgotten password."""
        return self._page(request, Entered())

    async def mail_password(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Mail a link that resets the password, if the address has an account."""
        return await self._mail(request, form)

    async def show_sign_up(self, request: Request) -> Response:
        """Show the form of a sign-up."""
        await self._require_open()
        return self._page(request, Entered())

    async def mail_sign_up(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Mail a link that opens a tenant."""
        await self._require_open()
        return await self._mail(request, form)

    async def _require_open(self) -> None:
        if not await sign_up.is_open(self.endpoint.dependencies.database):
            raise HTTPException(404)

    async def _mail(self, request: Request, form: Form) -> Response:
        dependencies, email = self.endpoint.dependencies, form.text("email")
        address = dependencies.addresses.of(request)
        try:
            with field_errors():
                await self.links.count(email, address)
        except FormInvalid as error:
            return self._page(request, form.entered(error.errors), status=422)
        except SignInSlowed as error:
            text = f"There were too many requests. The next one is possible in {error.retry_after_s} s."
            response = self._page(request, form.entered({"": text}), status=429)
            response.headers["retry-after"] = str(error.retry_after_s)
            return response
        mail = self.links.sign_up if request.url.path == SIGN_UP else self.links.reset
        dependencies.background_tasks.begin(mail(email, address))
        return self._page(request, Entered(), sent_to=email)

    def _page(self, request: Request, form: Entered, *, status: int = 200, sent_to: str = "") -> Response:
        return self.endpoint.page(
            request,
            None,
            "account/ask_for_link.html",
            status=status,
            form=form,
            sent_to=sent_to,
            signs_up=request.url.path == SIGN_UP,
        )
