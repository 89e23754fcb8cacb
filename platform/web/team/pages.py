"""The team of a tenant: members, roles, invitations, sessions: `/console/team`."""

from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from loraplex.platform.web.console.form_routes import FormSubmission, form_page, form_post, submits
from loraplex.platform.web.console.forms import Entered
from loraplex.platform.web.console.page import PageRequest, opens
from loraplex.platform.web.team.routes import UserId
from loraplex.tenants.people import team
from loraplex.tenants.people.records import link_address
from loraplex.tenants.people.sessions import end_member_sessions
from loraplex.tenants.people.sign_up import is_open
from loraplex.tenants.scopes import TENANT_ADMIN
from loraplex.tenants.unit_of_work import UnitOfWork

Admin = Annotated[PageRequest, opens(TENANT_ADMIN)]
Submission = Annotated[FormSubmission, submits(TENANT_ADMIN)]
LIST: Final = "/console/team"
ONE: Final = f"{LIST}/{{entry_id}}"
ROLES: Final = (
    ("admin", "admin: everything, also the team and the audit log"),
    ("developer", "developer: playground, adapters, keys, usage"),
    ("billing", "billing: bills, credits, usage"),
    ("viewer", "viewer: looks at adapters and usage"),
)
LAST_ADMIN: Final = "The tenant would be without an admin. Make another member an admin first."

router = APIRouter()


class InvitationForm(BaseModel):
    """Who is invited, and with which role."""

    email: str
    role: str


class RoleForm(BaseModel):
    """A role, and the revision of the membership that its author has seen."""

    role: str
    revision: int


@router.get(LIST)
async def list_team(page: Admin) -> Response:
    """Show members and open invitations."""
    entries = await page.query(team.members, page.tenant_id)
    provider, mails = page.dependencies.identity_provider, page.dependencies.mailed_links is not None
    return page.show(
        "team/team.html",
        members=[each for each in entries if each.state != "invited"],
        invitations=[each for each in entries if each.state == "invited"],
        domains=() if provider is None else provider.allowed_domains,
        signs_up=mails and await is_open(page.dependencies.database),
    )


async def invitation_form(page: Admin) -> dict[str, object]:
    """Return what the form of an invitation shows."""
    return {"roles": ROLES}


# `invite` is no id of a member.
@form_page(router, f"{LIST}/invite", "team/invite.html", invitation_form, fields=("email", "role"))
async def invite(submission: Submission) -> Response:
    values = submission.parse(InvitationForm)
    tenant = submission.session.tenant_name or ""
    return await invite_person(submission, submission.tenant_id, tenant, values)


async def invite_person(
    submission: FormSubmission, tenant_id: UUID, tenant: str, values: InvitationForm, back: str = LIST
) -> Response:
    """Invite a person to the tenant of this id and name, and show the link this once, above a link `back`. A form that was sent
    twice is mailed once.
    """
    invited = await submission.result(team.invite, tenant_id, values.email, values.role)
    links, mailed = submission.dependencies.mailed_links, False
    if links is not None and not submission.is_repeated:
        mailed = await links.invitation(values.email, invited.token, tenant, submission.session.email)
    return _show_link(submission, "invitation", values.email, invited.token, mailed=mailed, back=back)


@router.get(ONE)
async def show_member(page: Admin, entry_id: UserId) -> Response:
    return await _show(page, None, entry_id)


async def _show(page: PageRequest, refused: Entered | None, entry_id: UUID) -> Response:
    """Show one member or invitation and what can be done about it; `refused`: a form that was not carried out."""
    entries = await page.query(team.members, page.tenant_id)
    entry = next((each for each in entries if each.id == entry_id), None)
    if entry is None:
        raise HTTPException(404)
    admins = {each.id for each in entries if each.role == "admin" and each.state == "active"}
    return page.show(
        "team/member.html",
        entry=entry,
        form=refused,
        roles=ROLES,
        keeps_admin=LAST_ADMIN if entry.role == "admin" and not admins - {entry.id} else "",
    )


@form_post(router, f"{ONE}/role", _show)
async def change_role(submission: Submission, entry_id: UserId) -> Response:
    values = submission.parse(RoleForm)
    changed = await submission.result(
        team.change_role, submission.tenant_id, entry_id, values.role, seen=values.revision
    )
    return submission.back(LIST, f"{changed.email} has the role {changed.role} from the next sign-in on.")


@form_post(router, f"{ONE}/sign-out", _show)
async def sign_out(submission: Submission, entry_id: UserId) -> Response:
    """End a member's sessions in this tenant."""
    ended = await submission.result(end_member_sessions, submission.tenant_id, entry_id)
    return submission.back(LIST, f"{ended} session{'' if ended == 1 else 's'} ended.")


@form_post(router, f"{ONE}/reset", _show)
async def reset(submission: Submission, entry_id: UserId) -> Response:
    """Make a link by which a member sets a new password: mail it, or show it this once."""
    with_factor = submission.form.text("second_factor") == "on"
    email, token = await submission.result(_reset, submission.tenant_id, entry_id, with_factor)
    links = submission.dependencies.mailed_links
    if links is None:
        return _show_link(submission, "reset", email, token)
    tenant, person = submission.session.tenant_name or "", submission.session.email
    # A form that was sent twice is mailed once.
    if not submission.is_repeated and not await links.member_reset(email, token, tenant, person):
        return _show_link(submission, "reset", email, token, mail_failed=True)
    text = f"A link for a new password is mailed to {email}. It works once, for 24 hours."
    return submission.back(f"{LIST}/{entry_id}", text)


@form_post(router, f"{ONE}/remove", _show)
async def remove(submission: Submission, entry_id: UserId) -> Response:
    """Remove a member, or withdraw an invitation."""
    return submission.back(LIST, await submission.result(_remove, submission.tenant_id, entry_id))


async def _reset(uow: UnitOfWork, tenant_id: UUID, user_id: UUID, second_factor: bool) -> tuple[str, str]:
    """Return the address of a member, and the token of a link by which the member sets a new password."""
    member = await team.member(uow.session, tenant_id, user_id)
    return member.email, await team.reset_member(uow, tenant_id, user_id, second_factor=second_factor)


async def _remove(uow: UnitOfWork, tenant_id: UUID, entry_id: UUID) -> str:
    """Return what was done."""
    entry = await team.member(uow.session, tenant_id, entry_id)
    await team.remove(uow, tenant_id, entry_id)
    if entry.state == "invited":
        return f"The invitation of {entry.email} is withdrawn: its link works no longer."
    return f"{entry.email} is no member any more."


def _show_link(
    page: PageRequest,
    purpose: str,
    email: str,
    token: str,
    *,
    mailed: bool = False,
    mail_failed: bool = False,
    back: str = LIST,
) -> Response:
    return page.show(
        "team/link.html",
        purpose=purpose,
        email=email,
        address=link_address(page.endpoint.origin.of(page.http), token),
        mailed=mailed,
        mail_failed=mail_failed,
        back=back,
    )
