"""What links that work once lead to: an invitation that is accepted, a password that is set.

Invariant: opening a link changes nothing; only the form on its page uses it up.
"""

from typing import Annotated, Final

from starlette.responses import Response

from loraplex.platform.web.account.both_areas import BothAreas
from loraplex.platform.web.console.cookies import area_of
from loraplex.platform.web.console.endpoint import FIRST_PAGE, redirect
from loraplex.platform.web.console.form_routes import OpenSubmission, form_post, submits_as_anybody
from loraplex.platform.web.console.forms import Entered, FormInvalid
from loraplex.platform.web.console.page import OpenPage
from loraplex.tenants.administration.invitations import Acceptance, accept_invitation
from loraplex.tenants.errors import LinkNotValid, SecondFactorNeeded
from loraplex.tenants.people.own_account import reset_password
from loraplex.tenants.people.sign_in import find_link

OpenForm = Annotated[OpenSubmission, submits_as_anybody()]
TEMPLATES: Final = {
    "member": "account/accept.html",
    "operator": "account/accept.html",
    "sign_up": "account/accept.html",
    "reset": "account/reset.html",
}

router = BothAreas()


async def show_link(page: OpenPage, token: str, refused: Entered | None = None) -> Response:
    """Show the form of an invitation or a reset. Raises `LinkNotValid`."""
    link = await find_link(page.dependencies.database, token)
    template = TEMPLATES.get(link.purpose)
    if template is None:
        raise LinkNotValid("this link has no form")
    return page.show(template, link=link, token=token, form=refused or Entered())


async def _again(submission: OpenSubmission, refused: Entered) -> Response:
    return await show_link(submission, submission.form.text("token"), refused)


@form_post(router, "/accept", _again)
async def accept(submission: OpenForm) -> Response:
    """Accept an invitation, and sign in."""
    dependencies, form = submission.dependencies, submission.form
    entered = Acceptance(
        password=form.fields.get("password", ""),
        name=form.text("name"),
        email=form.text("email"),
        code=form.text("code") or None,
        tenant_name=form.text("tenant_name"),
    )
    try:
        signed_in = await accept_invitation(
            dependencies.database,
            form.text("token"),
            entered,
            submission.client,
            derive_key=dependencies.derive_key,
        )
    except SecondFactorNeeded as error:
        raise FormInvalid({"code": str(error)}) from error
    return submission.enter(signed_in)


@form_post(router, "/reset-password", _again)
async def reset(submission: OpenForm) -> Response:
    """Set a new password; the person then signs in with it."""
    dependencies, form = submission.dependencies, submission.form
    email = await reset_password(
        dependencies.database,
        form.text("token"),
        form.fields.get("password", ""),
        address=submission.client_address,
        publisher=dependencies.policy_publisher,
    )
    response = redirect(submission.http, f"{FIRST_PAGE[area_of(submission.http)]}/sign-in")
    text = f"{email} has a new password. Sign in with it."
    submission.cookies.leave_toast(response, text)
    return response
