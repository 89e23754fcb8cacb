"""A person's own account, in both areas: password, second factor, theme, sessions.

Any session may open it but that of an operator who looks into a tenant: the operator's own is in the operator area.
"""

import base64
from typing import Annotated, Final
from uuid import UUID

from starlette.responses import Response

from loraplex.platform.observability.request_id import request_id_of
from loraplex.platform.web.account.both_areas import BothAreas
from loraplex.platform.web.console.cookies import THEMES, area_of, theme_of
from loraplex.platform.web.console.endpoint import FIRST_PAGE, PageElsewhere, redirect
from loraplex.platform.web.console.form_routes import (
    FormSubmission,
    form_page,
    form_post,
    refused_form,
    submits_in_both_areas,
)
from loraplex.platform.web.console.forms import Entered
from loraplex.platform.web.console.page import PageRequest, opens_in_both_areas
from loraplex.platform.web.path_ids import PathId
from loraplex.tenants.errors import UserNotFound
from loraplex.tenants.people import own_account, second_factor
from loraplex.tenants.people.own_account import OwnAccount, protection
from loraplex.tenants.people.second_factor import Enrolment
from loraplex.tenants.people.sessions import (
    end_all_sessions,
    end_own_session,
    find_session,
    sessions_of_person,
)

Person = Annotated[PageRequest, opens_in_both_areas()]
Submission = Annotated[FormSubmission, submits_in_both_areas()]
SessionId = Annotated[UUID, PathId(UserNotFound, "no such session")]
ACCOUNT: Final = "/account"
ENROL: Final = f"{ACCOUNT}/second-factor"
PRESENT: Final = {"": "present"}
"""An error of the whole form is one of the present password."""

router = BothAreas()


@router.get(ACCOUNT)
async def show_account(page: Person) -> Response:
    _require_own(page)
    return await _show(page)


async def _show(page: PageRequest, refused: Entered | None = None) -> Response:
    """Show the account; `refused`: the change of a password, of which nothing but the errors is shown again."""
    database = page.dependencies.database
    return page.show(
        "account/account.html",
        form=None if refused is None else Entered(errors=refused.errors),
        sessions=await sessions_of_person(database, page.session),
        protection=await protection(database, page.session),
        themes=THEMES,
    )


@form_post(router, f"{ACCOUNT}/password", _show, fields=("present", "password"), renamed=PRESENT)
async def change_password(submission: Submission) -> Response:
    """Change the password; all other sessions end."""
    token = await own_account.change_password(_own(submission), submission.form.fields.get("password", ""))
    return _renewed(submission, token, "The new password is in force. All other sessions ended.")


async def question(page: Person) -> dict[str, object]:
    """Return what the question before a change shows. Raises `PageElsewhere`."""
    _require_own(page)
    return {"protection": await protection(page.dependencies.database, page.session)}


@form_page(router, ENROL, "account/enrol.html", question, fields=("present",), renamed=PRESENT)
async def enrol(submission: Submission) -> Response:
    """Show the secret of a new second factor, this once."""
    return _show_enrolment(submission, await second_factor.enrol(_own(submission)))


async def _not_confirmed(submission: FormSubmission, refused: Entered) -> Response:
    page = _show_enrolment(submission, None, Entered(errors=refused.errors))
    return refused_form(submission.http, page)


@form_post(router, f"{ENROL}/confirm", _not_confirmed)
async def confirm(submission: Submission) -> Response:
    """Turn the second factor on with its first code, and show the recovery codes, this once."""
    turned_on = await second_factor.confirm(_own(submission), submission.form.text("code"))
    area = area_of(submission.http)
    renewed = await find_session(submission.dependencies.database, turned_on.token, area)
    page = PageRequest(submission.endpoint, submission.http, renewed or submission.session)
    response = _show_codes(page, turned_on.recovery_codes, turned_on=True)
    submission.cookies.start_session(response, area, turned_on.token)
    return response


@form_page(
    router,
    f"{ENROL}/remove",
    "account/remove.html",
    question,
    fields=("present",),
    renamed=PRESENT,
)
async def remove(submission: Submission) -> Response:
    """Turn the second factor off."""
    token = await second_factor.disable(_own(submission), submission.form.text("code"))
    text = "Signing in takes the password alone. All other sessions ended."
    return _renewed(submission, token, text)


# A refused form replaces the page, also where a script sends it for a dialog.
@form_page(
    router,
    f"{ACCOUNT}/recovery-codes",
    "account/new_codes.html",
    question,
    fields=("present",),
    renamed=PRESENT,
    is_page=True,
)
async def make_codes(submission: Submission) -> Response:
    """Make new recovery codes, and show them this once."""
    codes = await second_factor.replace_recovery_codes(_own(submission), submission.form.text("code"))
    return _show_codes(submission, codes, turned_on=False)


@router.post(f"{ACCOUNT}/theme")
async def choose_theme(submission: Submission) -> Response:
    """Choose the theme of this browser; an unknown one is the system's."""
    response = redirect(submission.http, _address(submission))
    theme = theme_of(submission.form.text("theme"))
    submission.cookies.choose_theme(response, theme)
    return response


@router.post(f"{ACCOUNT}/sessions/end-all")
async def end_all(submission: Submission) -> Response:
    """Sign out everywhere else."""
    session = submission.session
    ended = await submission.run_own(end_all_sessions, session.user_id, but=session.id)
    return submission.back(_address(submission), f"{ended} other session{'' if ended == 1 else 's'} ended.")


@router.post(f"{ACCOUNT}/sessions/{{session_id}}/end")
async def end_one(submission: Submission, session_id: SessionId) -> Response:
    await submission.run_own(end_own_session, submission.session, session_id)
    return submission.back(_address(submission), "That session ended.")


def _require_own(page: PageRequest) -> None:
    """Raise `PageElsewhere` for an operator who looks into a tenant."""
    if page.session.viewing_as_operator:
        raise PageElsewhere(f"{FIRST_PAGE['operator']}{ACCOUNT}")


def _own(submission: FormSubmission) -> OwnAccount:
    dependencies = submission.dependencies
    return OwnAccount(
        database=dependencies.database,
        session=submission.session,
        password=submission.form.fields.get("present", ""),
        address=submission.client_address,
        request_id=request_id_of(submission.http.scope),
        derive_key=dependencies.derive_key,
        publisher=dependencies.policy_publisher,
    )


def _show_codes(page: PageRequest, codes: list[str], *, turned_on: bool) -> Response:
    return page.dialog("account/codes.html", codes=codes, turned_on=turned_on)


def _show_enrolment(
    page: PageRequest, enrolment: Enrolment | None, refused: Entered | None = None
) -> Response:
    image = None if enrolment is None else base64.b64encode(enrolment.qr_svg.encode()).decode()
    return page.show(
        "account/second_factor.html",
        form=refused,
        enrolment=enrolment,
        image=image,
    )


def _renewed(submission: FormSubmission, token: str, text: str) -> Response:
    """Go back to the account with the session's new token."""
    response = submission.back(_address(submission), text)
    submission.cookies.start_session(response, area_of(submission.http), token)
    return response


def _address(page: PageRequest) -> str:
    return f"{FIRST_PAGE[area_of(page.http)]}{ACCOUNT}"
