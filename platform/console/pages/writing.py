"""What pages with forms share: one template as a page or as a dialog, and forms that are shown again with their errors."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Final, TypeAlias
from uuid import UUID

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.console.endpoint import ConsoleEndpoint, SignInNeeded, is_htmx
from loraplex.platform.console.forms import Entered, Form, FormInvalid
from loraplex.platform.services.people.identity import ConsoleSession

MAX_NUMBER: Final = 2**31 - 1
"""The largest version or revision that is stored."""
MAX_DIGITS: Final = len(str(MAX_NUMBER))
VersionNumber: TypeAlias = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
"""The number of a version in an address; there is nothing at an address with another one."""
Show: TypeAlias = Callable[..., Awaitable[Response]]
Find: TypeAlias = Callable[[ConsoleEndpoint, ConsoleSession, str], Awaitable[Mapping[str, object]]]
"""A session and the name or id of one thing -> what the templates of its questions get."""


def layout_of(request: Request) -> str:
    """Return the template that a question extends: a dialog where htmx asks for it, else a page of its own."""
    return "dialog.html" if is_htmx(request) else "base.html"


def question(endpoint: ConsoleEndpoint, template: str, find: Find, **context: object) -> Show:
    """Return what shows a question about one thing, as a page or as a dialog; `find` reads the thing."""

    async def show(
        request: Request, session: ConsoleSession, identity: str, form: Entered, status: int = 200
    ) -> Response:
        found = await find(endpoint, session, identity)
        return endpoint.page(
            *(request, session, template),
            status=status,
            layout=layout_of(request),
            form=form,
            **found,
            **context,
        )

    return show


def refused_form(request: Request, response: Response) -> Response:
    """Let htmx put a form with errors in the place of the page, also if it asked for something else."""
    if is_htmx(request):
        response.headers.update({"hx-retarget": "#main", "hx-reselect": "#main", "hx-reswap": "outerHTML"})
    return response


def entered_again(
    form: Form, error: FormInvalid, shown: Collection[str], renamed: Mapping[str, str] = MappingProxyType({})
) -> Entered:
    """Return what was typed, with the errors. `shown`: the fields of the form; the error of another one stands above it.
    `renamed`: what a use case calls a field -> its name in the form.
    """
    named = {renamed.get(name, name): message for name, message in error.errors.items()}
    others = [message for name, message in named.items() if name not in shown]
    errors = {name: message for name, message in named.items() if name in shown}
    return form.entered(errors | ({"": " ".join(others)} if others else {}))


def revision_of(form: Form, name: str = "revision") -> int | None:
    """Return the revision that the form was rendered with; None if the form has none, for any."""
    return whole_number(form.text(name), beyond=MAX_NUMBER)


def whole_number(text: str, beyond: int | None = None) -> int | None:
    """Return the number that a text is; None if it is none, and `beyond` if it is larger than any that is stored."""
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text) if len(text) <= MAX_DIGITS and int(text) <= MAX_NUMBER else beyond


def tenant_of(session: ConsoleSession) -> UUID:
    """Return the tenant of a session of the tenant area. Raises `SignInNeeded` for one of the operator area."""
    if session.tenant_id is None:
        raise SignInNeeded
    return session.tenant_id
