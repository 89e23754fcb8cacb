"""A person's own account, in both areas: password, second factor, theme, sessions."""

import base64
from dataclasses import dataclass
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.observability.request_id import request_id_of
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.people.own_account import OwnAccount, protection
from loraplex.platform.services.people.passwords import change_password
from loraplex.platform.services.people.second_factor import (
    Enrolment,
    confirm,
    disable,
    enrol,
    replace_recovery_codes,
)
from loraplex.platform.services.people.sessions import (
    end_all_sessions,
    end_own_session,
    find_session,
    sessions_of_person,
)
from loraplex.platform.web.console.cookies import THEMES, area_of, theme_of
from loraplex.platform.web.console.endpoint import FIRST_PAGE, ConsoleEndpoint, SignInNeeded, redirect
from loraplex.platform.web.console.form_routes import entered_again, refused_form
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid, field_errors, read_form
from loraplex.platform.web.console.legacy_forms import layout_of
from loraplex.tenants.unit_of_work import UnitOfWork

FORM = Depends(read_form)
ENROL: Final = "second-factor"
REMOVE: Final = "second-factor/remove"
CODES: Final = "recovery-codes"
QUESTIONS: Final = {
    ENROL: "account/enrol.html",
    REMOVE: "account/remove.html",
    CODES: "account/new_codes.html",
}


def account_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the account."""
    router, pages = APIRouter(), AccountPages(endpoint)
    for first in FIRST_PAGE.values():
        account = f"{first}/account"
        router.add_api_route(account, pages.show, methods=["GET"], response_model=None)
        for method, path, handler in (
            ("POST", "password", pages.change_password),
            ("GET", ENROL, pages.ask_to_enrol),
            ("POST", ENROL, pages.enrol),
            ("POST", f"{ENROL}/confirm", pages.confirm),
            ("GET", REMOVE, pages.ask_to_remove),
            ("POST", REMOVE, pages.remove),
            ("GET", CODES, pages.ask_for_codes),
            ("POST", CODES, pages.make_codes),
            ("POST", "theme", pages.choose_theme),
            ("POST", "sessions/end-all", pages.end_all),
            ("POST", "sessions/{session_id}/end", pages.end_one),
        ):
            router.add_api_route(f"{account}/{path}", handler, methods=[method], response_model=None)
    return router


@dataclass(frozen=True, slots=True)
class AccountPages:
    """The pages of the account. Any session may open them, but that of an operator who looks into a tenant."""

    endpoint: ConsoleEndpoint

    async def show(self, request: Request) -> Response:
        """Show the account."""
        session = await self._session(request)
        if session.viewing_as_operator:
            return redirect(request, "/operator/console/account")
        return await self._account(request, session)

    async def change_password(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Change the password; all other sessions end."""
        session = await self._session(request)
        try:
            with field_errors():
                token = await change_password(
                    self._own(request, session, form), form.fields.get("password", "")
                )
        except FormInvalid as error:
            shown = entered_again(form, error, ("present", "password"), {"": "present"})
            return await self._account(request, session, Entered(errors=shown.errors), status=422)
        return self._renewed(
            request, session, token, "The new password is in force. All other sessions ended."
        )

    async def ask_to_enrol(self, request: Request) -> Response:
        """Ask for the password before a second factor is set up."""
        return await self._question(request, ENROL)

    async def enrol(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Show the secret of a new second factor, this once."""
        session = await self._session(request)
        try:
            with field_errors():
                enrolment = await enrol(self._own(request, session, form))
        except FormInvalid as error:
            return await self._question(request, ENROL, form, error)
        return self._second_factor(request, session, enrolment)

    async def confirm(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Turn the second factor on with its first code, and show the recovery codes, this once."""
        session = await self._session(request)
        try:
            with field_errors():
                turned_on = await confirm(self._own(request, session, form), form.text("code"))
        except FormInvalid as error:
            page = self._second_factor(request, session, None, Entered(errors=error.errors), status=422)
            return refused_form(request, page)
        area, database = area_of(request), self.endpoint.dependencies.database
        renewed = await find_session(database, turned_on.token, area) or session
        response = self._codes(request, renewed, turned_on.recovery_codes, turned_on=True)
        self.endpoint.cookies.start_session(request, response, area, turned_on.token)
        return response

    async def ask_to_remove(self, request: Request) -> Response:
        """Ask before the second factor is removed."""
        return await self._question(request, REMOVE)

    async def remove(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Turn the second factor off."""
        session = await self._session(request)
        try:
            with field_errors():
                token = await disable(self._own(request, session, form), form.text("code"))
        except FormInvalid as error:
            return await self._question(request, REMOVE, form, error)
        text = "Signing in takes the password alone. All other sessions ended."
        return self._renewed(request, session, token, text)

    async def choose_theme(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Choose the theme of this browser; an unknown one is the system's."""
        await self._session(request)
        response = redirect(request, _address(request))
        self.endpoint.cookies.choose_theme(request, response, theme_of(form.text("theme")))
        return response

    async def ask_for_codes(self, request: Request) -> Response:
        """Ask for the password before new recovery codes are made."""
        return await self._question(request, CODES)

    async def make_codes(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Make new recovery codes, and show them this once."""
        session = await self._session(request)
        try:
            with field_errors():
                codes = await replace_recovery_codes(self._own(request, session, form), form.text("code"))
        except FormInvalid as error:
            return refused_form(request, await self._question(request, CODES, form, error))
        return self._codes(request, session, codes, turned_on=False)

    async def end_all(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Sign out everywhere else."""
        session = await self._session(request)

        async def work(uow: UnitOfWork) -> int:
            return await end_all_sessions(uow, session.user_id, but=session.id)

        ended = await self.endpoint.perform_own(request, session, work)
        text = f"{ended} other session{'' if ended == 1 else 's'} ended."
        return self.endpoint.back(request, session, _address(request), text)

    async def end_one(self, request: Request, session_id: UUID, form: Annotated[Form, FORM]) -> Response:
        """End one session of the person."""
        session = await self._session(request)

        async def work(uow: UnitOfWork) -> None:
            await end_own_session(uow, session, session_id)

        await self.endpoint.perform_own(request, session, work)
        return self.endpoint.back(request, session, _address(request), "That session ended.")

    async def _session(self, request: Request) -> ConsoleSession:
        session = await self.endpoint.session(request)
        if session is None:
            raise SignInNeeded
        return session

    def _own(self, request: Request, session: ConsoleSession, form: Form) -> OwnAccount:
        dependencies = self.endpoint.dependencies
        return OwnAccount(
            database=dependencies.database,
            session=session,
            password=form.fields.get("present", ""),
            address=dependencies.addresses.of(request),
            request_id=request_id_of(request.scope),
            derive_key=dependencies.derive_key,
            publisher=dependencies.policy_publisher,
        )

    async def _account(
        self, request: Request, session: ConsoleSession, form: Entered | None = None, *, status: int = 200
    ) -> Response:
        database = self.endpoint.dependencies.database
        return self.endpoint.page(
            *(request, session, "account/account.html"),
            status=status,
            form=form,
            sessions=await sessions_of_person(database, session),
            protection=await protection(database, session),
            themes=THEMES,
        )

    async def _question(
        self, request: Request, question: str, form: Form | None = None, error: FormInvalid | None = None
    ) -> Response:
        """Show the question before a change, again with what was wrong where an error is given."""
        session = await self._session(request)
        if session.viewing_as_operator:
            return redirect(request, "/operator/console/account")
        shown = None
        if form is not None and error is not None:
            refused = entered_again(form, error, ("present",), {"": "present"})
            shown = Entered({"code": form.text("code")}, errors=refused.errors)
        return self.endpoint.page(
            *(request, session, QUESTIONS[question]),
            status=200 if shown is None else 422,
            layout=layout_of(request),
            form=shown,
            protection=await protection(self.endpoint.dependencies.database, session),
        )

    def _codes(
        self, request: Request, session: ConsoleSession, codes: list[str], *, turned_on: bool
    ) -> Response:
        return self.endpoint.page(
            *(request, session, "account/codes.html"),
            layout=layout_of(request),
            codes=codes,
            turned_on=turned_on,
        )

    def _second_factor(
        self,
        request: Request,
        session: ConsoleSession,
        enrolment: Enrolment | None,
        form: Entered | None = None,
        *,
        status: int = 200,
    ) -> Response:
        image = None if enrolment is None else base64.b64encode(enrolment.qr_svg.encode()).decode()
        return self.endpoint.page(
            request,
            session,
            "account/second_factor.html",
            status=status,
            form=form,
            enrolment=enrolment,
            image=image,
        )

    def _renewed(self, request: Request, session: ConsoleSession, token: str, text: str) -> Response:
        """Go back to the account with the session's new token."""
        response = self.endpoint.back(request, session, _address(request), text)
        self.endpoint.cookies.start_session(request, response, area_of(request), token)
        return response


def _address(request: Request) -> str:
    return f"{FIRST_PAGE[area_of(request)]}/account"
