"""The team of a tenant: members, roles, invitations, sessions: `/console/team`."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.people import team
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.people.link_addresses import link_address
from loraplex.platform.services.people.sessions import end_member_sessions
from loraplex.platform.services.people.sign_up import is_open
from loraplex.platform.services.people.team import TeamEntry
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid, field_errors, parse, read_form
from loraplex.platform.web.console.legacy_forms import tenant_of
from loraplex.tenants.unit_of_work import UnitOfWork

ROLES: Final = (
    ("admin", "admin: everything, also the team and the audit log"),
    ("developer", "developer: playground, adapters, keys, usage"),
    ("billing", "billing: bills, credits, usage"),
    ("viewer", "viewer: looks at adapters and usage"),
)
LAST_ADMIN: Final = "The tenant would be without an admin. Make another member an admin first."
ADMIN: Final = "tenant:admin"
MAX_ENTRIES: Final = 1000
FORM = Depends(read_form)


class InvitationForm(BaseModel):
    """Who is invited, and with which role."""

    email: str
    role: str


class RoleForm(BaseModel):
    """A role, and the revision of the membership that its author has seen."""

    role: str
    revision: int


def team_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the team."""
    router, pages = APIRouter(), TeamPages(endpoint)
    entry = "/console/team/{entry_id}"
    for method, path, handler in (
        ("GET", "/console/team", pages.members),
        ("GET", "/console/team/invite", pages.invitation),
        ("POST", "/console/team/invite", pages.invite),
        ("GET", entry, pages.member),
        ("POST", f"{entry}/role", pages.change_role),
        ("POST", f"{entry}/sign-out", pages.sign_out),
        ("POST", f"{entry}/reset", pages.reset),
        ("POST", f"{entry}/remove", pages.remove),
    ):
        router.add_api_route(path, handler, methods=[method], response_model=None)
    return router


@dataclass(frozen=True, slots=True)
class TeamPages:
    """The pages of the team, which take the scope `tenant:admin`."""

    endpoint: ConsoleEndpoint

    async def members(self, request: Request) -> Response:
        """Show members and open invitations."""
        session, entries = await self._team(request)
        dependencies = self.endpoint.dependencies
        provider, mails = dependencies.identity_provider, dependencies.mailed_links is not None
        return self.endpoint.page(
            request,
            session,
            "team/team.html",
            members=[each for each in entries if each.state != "invited"],
            invitations=[each for each in entries if each.state == "invited"],
            domains=() if provider is None else provider.allowed_domains,
            signs_up=mails and await is_open(dependencies.database),
        )

    async def invitation(self, request: Request) -> Response:
        """Show the form of an invitation."""
        session = await self.endpoint.signed_in(request, ADMIN)
        return self._invitation(request, session, Entered({"role": "developer"}))

    async def invite(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Invite a person, and show the link this once."""
        session, made = await self.endpoint.signed_in(request, ADMIN), list[str]()
        try:
            typed = parse(form, InvitationForm)

            async def work(uow: UnitOfWork) -> str:
                token = (await team.invite(uow, tenant_of(session), typed.email, typed.role)).token
                made.append(token)
                return token

            with field_errors():
                token = await self.endpoint.perform(request, session, form, work, str)
        except FormInvalid as error:
            return self._invitation(request, session, form.entered(error.errors), status=422)
        # A form that was sent twice is mailed once.
        mailed = bool(made) and await self._mail(session, typed.email, token)
        return self._link(request, session, "invitation", typed.email, token, mailed=mailed)

    async def member(self, request: Request, entry_id: UUID) -> Response:
        """Show one member or invitation and what can be done about it."""
        session, entries = await self._team(request)
        return await self._member(request, session, entries, entry_id, None)

    async def change_role(self, request: Request, entry_id: UUID, form: Annotated[Form, FORM]) -> Response:
        """Change a member's role."""

        async def work(uow: UnitOfWork, tenant_id: UUID) -> str:
            typed = parse(form, RoleForm)
            changed = await team.change_role(uow, tenant_id, entry_id, typed.role, seen=typed.revision)
            return f"{changed.email} has the role {changed.role} from the next sign-in on."

        return await self._change(request, entry_id, form, work)

    async def sign_out(self, request: Request, entry_id: UUID, form: Annotated[Form, FORM]) -> Response:
        """End a member's sessions in this tenant."""

        async def work(uow: UnitOfWork, tenant_id: UUID) -> str:
            ended = await end_member_sessions(uow, tenant_id, entry_id)
            return f"{ended} session{'' if ended == 1 else 's'} ended."

        return await self._change(request, entry_id, form, work)

    async def reset(self, request: Request, entry_id: UUID, form: Annotated[Form, FORM]) -> Response:
        """Make a link by which a member sets a new password: mail it, or show it this once."""
        session, entries = await self._team(request)
        with_factor, made = form.text("second_factor") == "on", list[str]()

        async def work(uow: UnitOfWork) -> str:
            made.append(await team.reset_member(uow, tenant_of(session), entry_id, second_factor=with_factor))
            return made[0]

        try:
            with field_errors():
                token = await self.endpoint.perform(request, session, form, work, str)
        except FormInvalid as error:
            return await self._member(request, session, entries, entry_id, form.entered(error.errors))
        email = next(each.email for each in entries if each.id == entry_id)
        links = self.endpoint.dependencies.mailed_links
        if links is None:
            return self._link(request, session, "reset", email, token)
        # A form that was sent twice is mailed once.
        if made and not await links.member_reset(email, token, session.tenant_name or "", session.email):
            return self._link(request, session, "reset", email, token, mail_failed=True)
        text = f"A link for a new password is mailed to {email}. It works once, for 24 hours."
        return self.endpoint.back(request, session, f"/console/team/{entry_id}", text)

    async def remove(self, request: Request, entry_id: UUID, form: Annotated[Form, FORM]) -> Response:
        """Remove a member, or withdraw an invitation."""

        async def work(uow: UnitOfWork, tenant_id: UUID) -> str:
            entry = await team.member(uow.session, tenant_id, entry_id)
            await team.remove(uow, tenant_id, entry_id)
            if entry.state == "invited":
                return f"The invitation of {entry.email} is withdrawn: its link works no longer."
            return f"{entry.email} is no member any more."

        return await self._change(request, entry_id, form, work)

    async def _change(
        self,
        request: Request,
        entry_id: UUID,
        form: Form,
        work: Callable[[UnitOfWork, UUID], Awaitable[str]],
    ) -> Response:
        """Perform a change of one entry and say what it did; where it is refused, show the entry with the reason."""
        session, entries = await self._team(request)

        async def change(uow: UnitOfWork) -> str:
            return await work(uow, tenant_of(session))

        try:
            with field_errors():
                text = await self.endpoint.perform(request, session, form, change, str)
        except FormInvalid as error:
            return await self._member(request, session, entries, entry_id, form.entered(error.errors))
        return self.endpoint.back(request, session, "/console/team", text)

    async def _team(self, request: Request) -> tuple[ConsoleSession, Sequence[TeamEntry]]:
        session = await self.endpoint.signed_in(request, ADMIN)

        async def find(transaction: AsyncSession) -> Sequence[TeamEntry]:
            return await team.members(transaction, tenant_of(session), limit=MAX_ENTRIES)

        return session, await self.endpoint.query(session, find)

    async def _member(
        self,
        request: Request,
        session: ConsoleSession,
        entries: Sequence[TeamEntry],
        entry_id: UUID,
        form: Entered | None,
    ) -> Response:
        entry = next((each for each in entries if each.id == entry_id), None)
        if entry is None:
            raise HTTPException(404)
        admins = [each.id for each in entries if each.role == "admin" and each.state == "active"]
        return self.endpoint.page(
            request,
            session,
            "team/member.html",
            status=200 if form is None else 422,
            entry=entry,
            form=form,
            roles=ROLES,
            keeps_admin=LAST_ADMIN if entry.role == "admin" and not {*admins} - {entry.id} else "",
        )

    def _invitation(
        self, request: Request, session: ConsoleSession, form: Entered, *, status: int = 200
    ) -> Response:
        return self.endpoint.page(request, session, "team/invite.html", status=status, form=form, roles=ROLES)

    async def _mail(self, session: ConsoleSession, email: str, token: str) -> bool:
        """Mail an invitation, where there is a mail server; return whether it took it."""
        links = self.endpoint.dependencies.mailed_links
        if links is None:
            return False
        return await links.invitation(email, token, session.tenant_name or "", session.email)

    def _link(
        self,
        request: Request,
        session: ConsoleSession,
        purpose: str,
        email: str,
        token: str,
        *,
        mailed: bool = False,
        mail_failed: bool = False,
    ) -> Response:
        address = link_address(self.endpoint.origin.of(request), token)
        return self.endpoint.page(
            *(request, session, "team/link.html"),
            purpose=purpose,
            email=email,
            address=address,
            mailed=mailed,
            mail_failed=mail_failed,
        )
