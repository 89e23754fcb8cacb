"""A person's own account, in both areas: password, second factor, theme, sessions."""

import base64
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.console.cookies import THEMES, area_of
from loraplex.platform.console.endpoint import FIRST_PAGE, ConsoleEndpoint, SignInNeeded, redirect
from loraplex.platform.console.forms import Entered, Form, FormInvalid, field_errors, read_form
from loraplex.platform.observability.request_id import request_id_of
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.people.passwords import change_password
from loraplex.platform.services.people.second_factor import Enrolment, confirm, disable, enrol
from loraplex.platform.services.people.sessions import end_all_sessions, end_own_session, sessions_of_person
from loraplex.platform.services.unit_of_work import UnitOfWork

FORM = Depends(read_form)


def account_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the account."""
    router, pages = APIRouter(), AccountPages(endpoint)
    for first in FIRST_PAGE.values():
        account = f"{first}/account"
        router.add_api_route(account, pages.show, methods=["GET"], response_model=None)
        for path, handler in (
            ("password", pages.change_password),
            ("second-factor", pages.enrol),
            ("second-factor/confirm", pages.confirm),
            ("second-factor/remove", pages.remove),
            ("theme", pages.choose_theme),
            ("sessions/end-all", pages.end_all),
            ("sessions/{session_id}/end", pages.end_one),
        ):
            router.add_api_route(f"{account}/{path}", handler, methods=["POST"], response_model=None)
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
        session, dependencies = await self._session(request), self.endpoint.dependencies
        try:
            with field_errors():
                token = await change_password(
                    dependencies.database,
                    session,
                    form.fields.get("present", ""),
                    form.fields.get("password", ""),
                    address=dependencies.addresses.of(request),
                    request_id=request_id_of(request.scope),
                    derive_key=dependencies.derive_key,
                )
        except FormInvalid as error:
            errors = {"present" if name == "" else name: text for name, text in error.errors.items()}
            return await self._account(request, session, Entered(errors=errors), status=422)
        return self._renewed(
            request, session, token, "The new password is in force. All other sessions ended."
        )

    async def enrol(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Show the secret of a new second factor, this once."""
        session = await self._session(request)

        async def work(uow: UnitOfWork) -> Enrolment:
            return await enrol(uow, session, derive_key=self.endpoint.dependencies.derive_key)

        return self._second_factor(request, session, await self.endpoint.perform_own(request, session, work))

    async def confirm(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Turn the second factor on with its first code."""
        session = await self._session(request)

        async def work(uow: UnitOfWork) -> str:
            return await confirm(
                uow, session, form.text("code"), derive_key=self.endpoint.dependencies.derive_key
            )

        try:
            with field_errors():
                token = await self.endpoint.perform_own(request, session, work)
        except FormInvalid as error:
            return self._second_factor(request, session, None, Entered(errors=error.errors), status=422)
        text = "Signing in takes a code from now on. All other sessions ended."
        return self._renewed(request, session, token, text)

    async def remove(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Turn the second factor off with a code."""
        session, dependencies = await self._session(request), self.endpoint.dependencies
        try:
            with field_errors():
                token = await disable(
                    dependencies.database,
                    session,
                    form.text("code"),
                    address=dependencies.addresses.of(request),
                    request_id=request_id_of(request.scope),
                    derive_key=dependencies.derive_key,
                )
        except FormInvalid as error:
            errors = {"code" if name == "" else name: text for name, text in error.errors.items()}
            return await self._account(request, session, Entered(errors=errors), status=422)
        text = "Signing in takes the password alone. All other sessions ended."
        return self._renewed(request, session, token, text)

    async def choose_theme(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Choose the theme of this browser; an unknown one is the system's."""
        await self._session(request)
        theme = next((each for each in THEMES if each == form.text("theme")), THEMES[0])
        response = redirect(request, _address(request))
        self.endpoint.cookies.choose_theme(request, response, theme)
        return response

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

    async def _account(
        self, request: Request, session: ConsoleSession, form: Entered | None = None, *, status: int = 200
    ) -> Response:
        sessions = await sessions_of_person(self.endpoint.dependencies.database, session)
        return self.endpoint.page(
            request,
            session,
            "account/account.html",
            status=status,
            form=form,
            sessions=sessions,
            themes=THEMES,
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
