"""What a page is given: the request of a signed-in person, which reads, shows and sends the browser on.

A page asks for it by `opens(SCOPE)`, first among its parameters:

    @router.get("/console/webhooks")
    async def list_webhooks(page: Reader) -> Response:
        return page.show("webhooks/list.html", webhooks=await page.query(queries.webhooks, page.tenant_id))
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeAlias, TypeVar
from urllib.parse import urlencode
from uuid import UUID

from fastapi import Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.web.console.cookies import Cookies, Undo
from loraplex.platform.web.console.endpoint import (
    ConsoleEndpoint,
    SignInNeeded,
    is_htmx,
    page_within,
    redirect,
)
from loraplex.platform.web.console.forms import Entered
from loraplex.platform.web.cursors import Cursors, Page, page_from
from loraplex.platform.web.sorting import KeyT, RowT, SortOrder
from loraplex.tenants.errors import SignInSlowed
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.people.sessions import Area, Client, SignedIn

P = ParamSpec("P")
T = TypeVar("T")
SessionOf: TypeAlias = Callable[[ConsoleEndpoint, Request], Awaitable[ConsoleSession]]
"""Finds the session of a request, which may open the page; raises for others."""
ROWS: Final = 50
"""The rows of a page's listing, unless its address has another one of `SIZES`."""
SIZES: Final = {"25": 25, "50": ROWS, "100": 100}
BEFORE: Final = "before"
"""The parameter of an address that names the last row of the page before."""
AFTER: Final = "after"
"""The same in lists whose addresses have had this name from the start."""


@dataclass(frozen=True, slots=True)
class OpenPage:
    """A request for a page that needs no session, such as that of signing in. `session` None: the browser has none."""

    endpoint: ConsoleEndpoint
    http: Request
    session: ConsoleSession | None

    @property
    def dependencies(self) -> GatewayDependencies:
        """What the gateway's routes use."""
        return self.endpoint.dependencies

    @property
    def client_address(self) -> str | None:
        """The address of the browser."""
        return self.dependencies.addresses.of(self.http)

    @property
    def cookies(self) -> Cookies:
        """The console's cookies of the browser."""
        return Cookies(self.endpoint.origin, self.http)

    @property
    def client(self) -> Client:
        """The browser, for its new session."""
        return Client(self.client_address, self.http.headers.get("user-agent"))

    def show(self, template: str, /, *, status: int | None = None, **context: Any) -> Response:
        """Respond with a whole page. `context` is what its template reads besides the variables of every page.

        `status` None: 422 where `form`, an `Entered`, has errors, else 200.
        """
        form, cookies = context.get("form"), self.cookies
        if status is None:
            status = 422 if isinstance(form, Entered) and form.errors else 200
        toast = cookies.toast()
        values = self.endpoint.context(self.http, self.session) | {"toast": toast} | context
        response = HTMLResponse(self.endpoint.templates.render(template, values), status)
        if toast is not None:
            cookies.drop_toast(response)
        return response

    def enter(self, signed_in: SignedIn, page: str = "") -> Response:
        """Give the browser a new session, and open `page` if it is one of the session's area, else the first one."""
        self.endpoint.give_back_try(self.http)
        area: Area = "operator" if signed_in.session.tenant_id is None else "tenant"
        response = redirect(self.http, page_within(area, page))
        self.cookies.start_session(response, area, signed_in.token)
        return response


@dataclass(frozen=True, slots=True)
class Rows(Generic[RowT]):
    """The rows of one page of a listing, and the addresses of the next older and of the newest ones; None where there is none.
    `sizes`: the number of rows of a page -> its address, None for that of this page.
    """

    rows: Sequence[RowT]
    older: str | None
    newest: str | None
    sizes: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class PageRequest(OpenPage):
    """The request of a person for a page, in the database role of the session."""

    session: ConsoleSession

    @property
    def tenant_id(self) -> UUID:
        """The tenant of the session. Raises `SignInNeeded` for one of the operator area."""
        if self.session.tenant_id is None:
            raise SignInNeeded
        return self.session.tenant_id

    @property
    def currency(self) -> str:
        """The currency of the tenant's money."""
        return self.dependencies.currency_of(self.tenant_id)

    def lacks(self, scope: str) -> str:
        """Return why the person may not do what needs `scope`; "" where the person may."""
        return "" if scope in self.session.scopes else f"Needs the scope {scope}, which your role has not."

    def reading(self) -> AbstractAsyncContextManager[AsyncSession]:
        """Open a transaction for several queries, in the role of the session's tenant, or of operators."""
        return self.endpoint.runner.reading(self.session.tenant_id)

    async def query(
        self, find: Callable[Concatenate[AsyncSession, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what `find` reads in a transaction of its own."""
        return await self.endpoint.runner.query(self.session.tenant_id, find, *args, **kwargs)

    def part(self, order: SortOrder[RowT, KeyT], *, parameter: str = BEFORE) -> Page[RowT, KeyT]:
        """Return the part of a listing that the page's address asks for by its `parameter`, with as many rows as its `size` says.

        Raises `InvalidParameter` for a place that no page of this person's tenant has named.
        """
        scope = f"{self.session.tenant_id or 'operator'} {self.http.url.path}".encode()
        size = SIZES.get(self.http.query_params.get("size", ""), ROWS)
        return page_from(self.http, Cursors(self.endpoint.cursor_key, scope), order, parameter, size)

    def rows(
        self,
        part: Page[Any, KeyT],
        found: Sequence[RowT],
        *,
        parameter: str = BEFORE,
        more_after: KeyT | None = None,
    ) -> Rows[RowT]:
        """Return the rows of `part`, and the links that keep the other filters of the address. `parameter` as in `part`.

        The rows were read with one more, or `more_after` is the key behind which there are others.
        """
        cursor, path = part.next(found) if more_after is None else part.cursor(more_after), self.http.url.path
        kept = [(name, value) for name, value in self.http.query_params.multi_items() if name != parameter]
        older = None if cursor is None else f"{path}?{urlencode([*kept, (parameter, cursor)])}"
        newest = f"{path}?{urlencode(kept)}" if kept else path
        others = [pair for pair in kept if pair[0] != "size"]
        sizes = {
            size: None if number == part.limit else f"{path}?{urlencode([*others, ('size', size)])}"
            for size, number in SIZES.items()
        }
        is_long = older or part.after or len(found) > min(SIZES.values())
        return Rows(part.cut(found), older, None if part.after is None else newest, sizes if is_long else {})

    def fragment(self, template: str, block: str, /, *, status: int = 200, **context: Any) -> Response:
        """Respond with one block of a page's template, for htmx."""
        values = self.endpoint.context(self.http, self.session) | {"toast": None} | context
        return HTMLResponse(self.endpoint.templates.render_block(template, block, values), status)

    def dialog(self, template: str, /, **context: Any) -> Response:
        """Respond with a page that is a dialog where htmx asks for it."""
        layout = "dialog.html" if is_htmx(self.http) else "base.html"
        return self.show(template, layout=layout, **context)

    def back(self, location: str, toast: str, undo: Undo | None = None) -> Response:
        """Send the browser to `location`, a path of this server, after a change; the page there shows `toast` once, with a
        button for `undo`.
        """
        response = redirect(self.http, location)
        self.cookies.leave_toast(response, toast, undo)
        return response


def slowed(response: Response, error: SignInSlowed) -> Response:
    """Let `response`, a page that says so, ask the browser to wait: 429."""
    response.status_code = 429
    response.headers["retry-after"] = str(error.retry_after_s)
    return response


def opens_to_anybody() -> Any:
    """Return a dependency that gives a page its `OpenPage`, also without a session."""

    async def opened(request: Request) -> OpenPage:
        return OpenPage(request.app.state.endpoint, request, None)

    return Depends(opened)


def opens_in_both_areas() -> Any:
    """Return a dependency that gives a page of either area its `PageRequest`. It raises `SignInNeeded`."""
    return _opens(ConsoleEndpoint.signed_in_anywhere)


def opens(scope: str | None) -> Any:
    """Return a dependency that gives a page of the tenant area its `PageRequest`. The session must have `scope`.

    It raises `SignInNeeded`, `InsufficientScope` and `StoreUnavailable` of tenants.
    """
    return _opens(lambda endpoint, request: endpoint.signed_in(request, scope))


def opens_operator() -> Any:
    """Return a dependency that gives a page of the operator area its `PageRequest`. It raises as `opens`."""
    return _opens(ConsoleEndpoint.signed_in_operator)


def _opens(session_of: SessionOf) -> Any:
    async def opened(request: Request) -> PageRequest:
        endpoint: ConsoleEndpoint = request.app.state.endpoint
        return PageRequest(endpoint, request, await session_of(endpoint, request))

    return Depends(opened)
