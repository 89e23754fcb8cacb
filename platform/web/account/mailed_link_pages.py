"""Asking for a link by mail: a forgotten password, and a tenant of one's own. Only where a mail server is set.

Invariant: what is answered does not depend on the address.
"""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final, TypeAlias

from fastapi import APIRouter, Depends
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.auth.mailed_links import MailedLinks
from loraplex.platform.web.console.form_routes import OpenSubmission, form_post, submits_as_anybody
from loraplex.platform.web.console.forms import Entered
from loraplex.platform.web.console.page import OpenPage, opens_to_anybody, slowed
from loraplex.tenants.errors import SignInSlowed
from loraplex.tenants.people import sign_up

PASSWORD: Final = "/console/forgot-password"
SIGN_UP: Final = "/console/sign-up"
Mail: TypeAlias = Callable[[str, str | None], Coroutine[Any, Any, None]]
"""(address that was typed, address of the browser) -> a mail that is sent in the background."""


async def mailed_links(request: Request) -> MailedLinks:
    """Return what mails links."""
    links: MailedLinks = request.app.state.endpoint.dependencies.mailed_links
    return links


Links = Annotated[MailedLinks, Depends(mailed_links)]
Visitor = Annotated[OpenPage, opens_to_anybody()]
OpenForm = Annotated[OpenSubmission, submits_as_anybody()]

router = APIRouter()


@router.get(PASSWORD)
async def show_password(page: Visitor) -> Response:
    """Show the form of a forgotten password."""
    return _show(page, Entered())


@router.get(SIGN_UP)
async def show_sign_up(page: Visitor) -> Response:
    """Show the form of a sign-up."""
    await _require_open(page)
    return _show(page, Entered())


async def _again(submission: OpenSubmission, refused: Entered) -> Response:
    return _show(submission, refused)


@form_post(router, PASSWORD, _again)
async def mail_password(submission: OpenForm, links: Links) -> Response:
    """Mail a link that resets the password, if the address has an account."""
    return await _mail(submission, links, links.reset)


@form_post(router, SIGN_UP, _again)
async def mail_sign_up(submission: OpenForm, links: Links) -> Response:
    """Mail a link that opens a tenant."""
    await _require_open(submission)
    return await _mail(submission, links, links.sign_up)


async def _require_open(page: OpenPage) -> None:
    if not await sign_up.is_open(page.dependencies.database):
        raise HTTPException(404)


async def _mail(submission: OpenSubmission, links: MailedLinks, mail: Mail) -> Response:
    email, address = submission.form.text("email"), submission.client_address
    try:
        await links.count(email, address)
    except SignInSlowed as error:
        text = f"There were too many requests. The next one is possible in {error.retry_after_s} s."
        return slowed(_show(submission, submission.form.entered({"": text})), error)
    submission.dependencies.background_tasks.begin(mail(email, address))
    return _show(submission, Entered(), sent_to=email)


def _show(page: OpenPage, form: Entered, *, sent_to: str = "") -> Response:
    return page.show(
        "account/ask_for_link.html",
        form=form,
        sent_to=sent_to,
        signs_up=page.http.url.path == SIGN_UP,
    )
