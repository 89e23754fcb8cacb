"""Signing in and out of both areas, and the switch of the tenant: `/console/sign-in`, `/operator/console/sign-in`."""

from typing import Annotated, Final
from uuid import UUID

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from loraplex.platform.web.account.both_areas import BothAreas
from loraplex.platform.web.account.link_pages import show_link
from loraplex.platform.web.account.sealed_values import SealedValues
from loraplex.platform.web.console.cookies import area_of
from loraplex.platform.web.console.endpoint import FIRST_PAGE, page_within, redirect
from loraplex.platform.web.console.error_pages import USED_UP
from loraplex.platform.web.console.form_routes import (
    FormSubmission,
    OpenSubmission,
    submits_as_anybody,
    submits_in_both_areas,
)
from loraplex.platform.web.console.forms import Entered
from loraplex.platform.web.console.page import OpenPage, opens_to_anybody, slowed
from loraplex.tenants.errors import (
    LinkNotValid,
    SecondFactorNeeded,
    SignInRefused,
    SignInSlowed,
)
from loraplex.tenants.people import sessions
from loraplex.tenants.people.codes import recovery_code
from loraplex.tenants.people.own_account import protection
from loraplex.tenants.people.sessions import Area, SignedIn
from loraplex.tenants.people.sign_in import find_link, sign_in, use_link
from loraplex.tenants.people.sign_up import is_open

Visitor = Annotated[OpenPage, opens_to_anybody()]
OpenForm = Annotated[OpenSubmission, submits_as_anybody()]
Submission = Annotated[FormSubmission, submits_in_both_areas()]
SIGN_IN: Final = "/sign-in"

router = BothAreas()
tenant_router = APIRouter()


class Pair(msgspec.Struct, frozen=True):
    """An email address and a password, as they were typed in the first step, for the step that asks for the code."""

    email: str
    password: str


TICKETS: Final = SealedValues(b"loraplex/sign-in-ticket/v1", Pair, lifetime_s=300)


class TenantChoice(BaseModel):
    """The tenant to switch to."""

    tenant_id: UUID


@router.get(SIGN_IN)
async def show_sign_in(page: Visitor, token: str = "", next: str = "") -> Response:
    """Show the form; a link's token signs in by itself, or leads on to what the link is for."""
    if token:
        return await _by_link(page, token)
    if await page.endpoint.session(page.http) is not None:
        return redirect(page.http, page_within(area_of(page.http), next))
    dependencies = page.dependencies
    signs_up = dependencies.mailed_links is not None and await is_open(dependencies.database)
    return _show_form(page, Entered({"next": next}), signs_up=signs_up)


@router.post(SIGN_IN)
async def submit_sign_in(submission: OpenForm) -> Response:
    """Check the pair and, in a second step, the code."""
    form = submission.form
    pair = TICKETS.open(submission.dependencies.derive_key, form.text("ticket"))
    typed = pair or Pair(form.text("email"), form.fields.get("password", ""))
    try:
        signed_in = await _sign_in(submission, typed, form.text("code") or None)
    except SecondFactorNeeded:
        return _show_code(submission, typed, {})
    except SignInRefused as error:
        if pair is not None:
            return _show_code(submission, typed, {"code": str(error)})
        return _show_form(submission, form.entered({"password": str(error)}))
    except SignInSlowed as error:
        text = f"There were too many failed sign-ins. The next one is possible in {error.retry_after_s} s."
        return slowed(_show_form(submission, form.entered({"": text})), error)
    response = submission.enter(signed_in, form.text("next"))
    if recovery_code(form.text("code")) is not None:
        left = (await protection(submission.dependencies.database, signed_in.session)).recovery_codes
        text = f"You signed in with a recovery code; {left} {'is' if left == 1 else 'are'} left."
        submission.cookies.leave_toast(response, text)
    return response


@router.post("/sign-out")
async def sign_out(submission: Submission) -> Response:
    """End the session."""
    await submission.run_own(sessions.end_session, submission.session)
    area = area_of(submission.http)
    is_viewing = submission.session.viewing_as_operator
    left = FIRST_PAGE["operator"] if is_viewing else f"{FIRST_PAGE[area]}{SIGN_IN}"
    response = redirect(submission.http, left)
    submission.cookies.end_session(response, area)
    return response


@tenant_router.post("/console/switch-tenant")
async def switch_tenant(submission: Submission) -> Response:
    """Go on in another tenant of the person, with a new token."""
    chosen = submission.parse(TenantChoice).tenant_id
    token = await submission.run_own(sessions.switch_tenant, submission.session, chosen)
    name = dict(submission.session.tenants)[chosen]
    response = submission.back(FIRST_PAGE["tenant"], f"You are in {name} now.")
    submission.cookies.start_session(response, "tenant", token)
    return response


async def _by_link(page: OpenPage, token: str) -> Response:
    database = page.dependencies.database
    try:
        if (await find_link(database, token)).purpose != "demo":
            return await show_link(page, token)
        return page.enter(await use_link(database, token, page.client, area=_area(page)))
    except LinkNotValid:
        return _show_form(page, Entered(errors={"": USED_UP}), status=404)


async def _sign_in(page: OpenPage, pair: Pair, code: str | None) -> SignedIn:
    return await sign_in(
        page.dependencies.database,
        pair.email,
        pair.password,
        code,
        page.client,
        derive_key=page.dependencies.derive_key,
        area=_area(page),
    )


def _area(page: OpenPage) -> Area | None:
    return "operator" if area_of(page.http) == "operator" else None


def _show_form(
    page: OpenPage, form: Entered, *, status: int | None = None, signs_up: bool = False
) -> Response:
    return page.show("account/sign_in.html", status=status, form=form, signs_up=signs_up)


def _show_code(submission: OpenSubmission, pair: Pair, errors: dict[str, str]) -> Response:
    return submission.show(
        "account/code.html",
        form=Entered({"next": submission.form.text("next")}, errors=errors),
        ticket=TICKETS.seal(submission.dependencies.derive_key, pair),
    )
