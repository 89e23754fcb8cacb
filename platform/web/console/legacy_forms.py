"""Forms of the pages that have not moved to their rooms yet."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, TypeVar, overload
from uuid import UUID

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.console.cookies import Undo
from loraplex.platform.web.console.endpoint import ConsoleEndpoint, SignInNeeded, is_htmx
from loraplex.platform.web.console.form_routes import entered_again, refused_form
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid, field_errors, read_form
from loraplex.tenants.unit_of_work import UnitOfWork

Find: TypeAlias = Callable[[ConsoleEndpoint, Request, ConsoleSession], Awaitable[Mapping[str, object]]]
"""What the template of a form is given besides the form: of the thing that the request's path names."""
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Sent:
    """A form that was sent by the person of `session`."""

    endpoint: ConsoleEndpoint
    request: Request
    session: ConsoleSession
    form: Form

    @property
    def tenant_id(self) -> UUID:
        """The tenant of the session. Raises `SignInNeeded` for one of the operator area."""
        return tenant_of(self.session)

    @overload
    async def perform(self, work: Callable[[UnitOfWork], Awaitable[object]]) -> None: ...

    @overload
    async def perform(
        self, work: Callable[[UnitOfWork], Awaitable[ResultT]], returns: type[ResultT]
    ) -> ResultT: ...

    async def perform(
        self, work: Callable[[UnitOfWork], Awaitable[Any]], returns: type[Any] | None = None
    ) -> Any:
        """Run `work` as `ConsoleEndpoint.perform`."""
        if returns is None:
            return await self.endpoint.perform(self.request, self.session, self.form, work)
        return await self.endpoint.perform(self.request, self.session, self.form, work, returns)

    def back(self, location: str, toast: str, undo: Undo | None = None) -> Response:
        """Send the browser to `location` as `ConsoleEndpoint.back`."""
        return self.endpoint.back(self.request, self.session, location, toast, undo)

    def show_once(self, template: str, made: object) -> Response:
        """Show a new secret, in a dialog where htmx asked for it: then no reload of the page sends the form again."""
        layout = layout_of(self.request)
        return self.endpoint.page(self.request, self.session, template, layout=layout, made=made)

    def named(self, parameter: str) -> str:
        """Return what the path names: one of its parameters."""
        return str(self.request.path_params[parameter])


Send: TypeAlias = Callable[[Sent], Awaitable[Response]]
"""Does what a form asks for. An error that its author can mend shows the form again."""


def layout_of(request: Request) -> str:
    """Return the template that a question extends: a dialog where htmx asks for it, else a page of its own."""
    return "dialog.html" if is_htmx(request) else "base.html"


def add_form(
    router: APIRouter,
    path: str,
    endpoint: ConsoleEndpoint,
    *,
    access: Any,
    template: str,
    find: Find,
    send: Send,
    fields: Collection[str] = (),
    renamed: Mapping[str, str] = MappingProxyType({}),
    is_page: bool = False,
    **context: object,
) -> None:
    """Add a form at `path`, as a page or as a dialog: GET shows it and POST runs `send`, for sessions that `access` gives.

    What `send` raises and the author can mend is shown in the form, with status 422 and all that was typed: at a field of
    `fields`, else above the form. `renamed` as in `entered_again`. `is_page`: the form is never a dialog, though a script may
    send it for one.
    """

    async def show(request: Request, session: ConsoleSession, form: Entered, status: int = 200) -> Response:
        found = await find(endpoint, request, session)
        return endpoint.page(
            *(request, session, template),
            status=status,
            layout=layout_of(request),
            form=form,
            **found,
            **context,
        )

    @router.get(path)
    async def ask(request: Request, session: Annotated[ConsoleSession, access]) -> Response:
        return await show(request, session, Entered())

    @router.post(path)
    async def answer(
        request: Request,
        session: Annotated[ConsoleSession, access],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        try:
            with field_errors():
                return await send(Sent(endpoint, request, session, form))
        except FormInvalid as error:
            again = await show(request, session, entered_again(form, error, fields, renamed), 422)
            return refused_form(request, again) if is_page else again


def tenant_of(session: ConsoleSession) -> UUID:
    """Return the tenant of a session of the tenant area. Raises `SignInNeeded` for one of the operator area."""
    if session.tenant_id is None:
        raise SignInNeeded
    return session.tenant_id
