"""What every page of the console is given: its session, reads and changes in the session's role, and its responses.

Invariant: a page runs as the person of its session, in the database role of the session's tenant or as an operator.
"""

import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, TypeVar, overload
from urllib.parse import quote, urlencode

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from loraplex.platform.auth.failure_buckets import REFILL_S, FailureBuckets
from loraplex.platform.errors import FormRefused, InsufficientScope
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.observability.request_id import request_id_of
from loraplex.platform.web.console.cookies import OPERATOR_PATH, TENANT_PATH, Cookies, Undo, area_of
from loraplex.platform.web.console.csrf import is_token, masked
from loraplex.platform.web.console.forms import CSRF_HEADER, Form
from loraplex.platform.web.console.navigation import OPERATOR_AREA, TENANT_AREA, navigation
from loraplex.platform.web.console.origin import PublicOrigin
from loraplex.platform.web.console.templating import Templates
from loraplex.platform.web.cursors import CURSOR_DOMAIN
from loraplex.platform.web.runner import Runner
from loraplex.tenants.actors import Actor
from loraplex.tenants.api_keys.networks import client_network
from loraplex.tenants.errors import SignInSlowed, StoredResponseUnreadable
from loraplex.tenants.idempotency import RepeatableRequest
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.people.sessions import Area, SignedIn, find_session
from loraplex.tenants.stored_responses import StoredResponse
from loraplex.tenants.unit_of_work import UnitOfWork

ResultT = TypeVar("ResultT")
FIRST_PAGE: Final[dict[Area, str]] = {"tenant": TENANT_PATH, "operator": OPERATOR_PATH}


# The characters of an address (RFC 3986), with those that are encoded already: a line break would begin another header.
_ADDRESS: Final = ":/%#?=@[]!$&'()*+,;"


class SignInNeeded(Exception):
    """The request has no session, or one that ended."""


class PageElsewhere(Exception):
    """The browser is sent to `location`, a path of this server, in place of what it asked for."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.location = location


class ConsoleEndpoint:
    """Runs the work of pages in the role of a session, and builds their responses."""

    def __init__(
        self,
        dependencies: GatewayDependencies,
        templates: Templates,
        origin: PublicOrigin,
        *,
        is_demo: bool = False,
    ) -> None:
        self._dependencies = dependencies
        self._templates = templates
        self.runner = Runner(dependencies, "pages")
        self.cursor_key = dependencies.derive_key(CURSOR_DOMAIN)
        self.origin = origin
        self.is_demo = is_demo
        self.cookies = Cookies(origin)
        self._tries = FailureBuckets()

    @property
    def dependencies(self) -> GatewayDependencies:
        """What the gateway's routes use."""
        return self._dependencies

    async def signed_in(self, request: Request, scope: str | None = None) -> ConsoleSession:
        """Return the session of a page of the tenant area, which must have `scope`. It raises as the dependency does."""
        session = await self.session(request)
        if session is None or session.tenant_id is None:
            raise SignInNeeded
        if scope is not None and scope not in session.scopes:
            raise InsufficientScope(_scope_missing(scope, session), param=scope)
        return session

    async def signed_in_operator(self, request: Request) -> ConsoleSession:
        """Return the session of a page of the operator area. It raises as `signed_in`."""
        session = await self.signed_in_anywhere(request)
        if not session.operator:
            raise InsufficientScope("Only operators may open this page.", param="operator")
        return session

    async def signed_in_anywhere(self, request: Request) -> ConsoleSession:
        """Return the session of a page that both areas have. Raises `SignInNeeded`."""
        session = await self.session(request)
        if session is None:
            raise SignInNeeded
        return session

    async def session(self, request: Request) -> ConsoleSession | None:
        """Return the session of the request's area, read once per request."""
        if not hasattr(request.state, "console_session"):
            token = self.cookies.session_token(request)
            request.state.console_session = (
                None
                if token is None
                else await find_session(self._dependencies.database, token, area_of(request))
            )
        session: ConsoleSession | None = request.state.console_session
        request.state.tenant_id = None if session is None else session.tenant_id
        return session

    async def check_token(self, request: Request, sent: str | None) -> None:
        """Raise `FormRefused` unless the CSRF token is that of the request's session, `SignInNeeded` without one."""
        session = await self.signed_in_anywhere(request)
        if not is_token(sent or request.headers.get(CSRF_HEADER), session.csrf_token):
            raise FormRefused("This form belongs to another session. Open the page again and repeat it.")

    def count_try(self, request: Request) -> None:
        """Count what a client network sends to sign in, before it costs more than this. Raises `SignInSlowed`."""
        if not self._tries.take(self._network(request)):
            raise SignInSlowed(math.ceil(REFILL_S))

    def give_back_try(self, request: Request) -> None:
        """Undo one `count_try`: it was a step of a sign-in that succeeds."""
        self._tries.give_back(self._network(request))

    def _network(self, request: Request) -> str:
        return client_network(self._dependencies.addresses.of(request))

    @overload
    async def perform(
        self,
        request: Request,
        session: ConsoleSession,
        form: Form,
        work: Callable[[UnitOfWork], Awaitable[object]],
    ) -> None: ...

    @overload
    async def perform(
        self,
        request: Request,
        session: ConsoleSession,
        form: Form,
        work: Callable[[UnitOfWork], Awaitable[ResultT]],
        returns: type[ResultT],
    ) -> ResultT: ...

    async def perform(
        self,
        request: Request,
        session: ConsoleSession,
        form: Form,
        work: Callable[[UnitOfWork], Awaitable[Any]],
        returns: Any = None,
    ) -> Any:
        """Run `work` in one unit of work of the session's person, once for a form that is sent twice.

        The result is that of the first time, if `returns` names its type: one that pydantic writes as JSON. Raises
        `InsufficientScope` where an operator looks into a tenant.
        """
        if session.viewing_as_operator:
            raise InsufficientScope("You look into this tenant as an operator: nothing can be changed here.")
        result, fresh = None if returns is None else result_type(returns), []

        async def stored(uow: UnitOfWork) -> StoredResponse:
            fresh.append(await work(uow))
            return StoredResponse(200, [], b"null" if result is None else result.dump_json(fresh[0]))

        tenant_id, repeatable = session.tenant_id, repeatable_of(request, session, form)
        done = await self.runner.change(self._actor(request, session), tenant_id, repeatable, stored)
        request.state.form_is_repeated = not fresh
        if result is None:
            return None
        if fresh:
            return fresh[0]
        try:
            return result.validate_json(done.body)
        except ValidationError:
            # Not chained: another release may have stored a secret in it.
            raise StoredResponseUnreadable(
                "the result of this form was stored by another release: open its page again"
            ) from None

    async def perform_own(
        self, request: Request, session: ConsoleSession, work: Callable[[UnitOfWork], Awaitable[ResultT]]
    ) -> ResultT:
        """Run `work`, which changes nothing of a tenant but the person's own session, in one unit of work of the person.

        Its result is never stored: it may be the token of a session.
        """
        async with self.runner.unit_of_work(self._actor(request, session), session.tenant_id) as uow:
            return await work(uow)

    def page(
        self,
        request: Request,
        session: ConsoleSession | None,
        template: str,
        /,
        *,
        status: int = 200,
        **context: Any,
    ) -> Response:
        """Respond with a whole page. `context` is what its template reads besides the variables of every page."""
        toast = self.cookies.toast(request)
        content = self._templates.render(
            template, self._context(request, session) | {"toast": toast} | context
        )
        response = HTMLResponse(content, status)
        if toast is not None:
            self.cookies.drop_toast(request, response)
        return response

    def fragment(
        self,
        request: Request,
        session: ConsoleSession,
        template: str,
        block: str,
        /,
        *,
        status: int = 200,
        **context: Any,
    ) -> Response:
        """Respond with one block of a page's template, for htmx."""
        values = self._context(request, session) | {"toast": None} | context
        return HTMLResponse(self._templates.render_block(template, block, values), status)

    def back(
        self,
        request: Request,
        session: ConsoleSession,
        location: str,
        toast: str,
        undo: Undo | None = None,
    ) -> Response:
        """Send the browser to `location`, a path of this server, after a change; the page there shows `toast` once, with a
        button for `undo`.
        """
        response = redirect(request, location)
        self.cookies.leave_toast(request, response, toast, undo)
        return response

    def enter(self, request: Request, signed_in: SignedIn, page: str = "") -> Response:
        """Give the browser a new session, and open `page` if it is one of the session's area, else the first one."""
        self.give_back_try(request)
        area: Area = "operator" if signed_in.session.tenant_id is None else "tenant"
        response = redirect(request, page_within(area, page))
        self.cookies.start_session(request, response, area, signed_in.token)
        return response

    def _context(self, request: Request, session: ConsoleSession | None) -> dict[str, Any]:
        path, area = request.url.path, area_of(request)
        groups = OPERATOR_AREA if area == "operator" else TENANT_AREA
        scopes = frozenset[str]() if session is None else session.scopes
        provider = self._dependencies.identity_provider
        return {
            "session": session,
            "nav": navigation(groups, scopes, path, _counts(session)),
            "area": area,
            "home": FIRST_PAGE[area],
            "request_path": path,
            "request_id": request_id_of(request.scope),
            "public_host": self.origin.host(request),
            "base_url": f"{self.origin.of(request)}/v1",
            "served_model": self._dependencies.served_model_name,
            "can_mail": self._dependencies.mailed_links is not None,
            "provider_name": None if provider is None else provider.name,
            "csrf": None if session is None else masked(session.csrf_token),
            "now": datetime.now(UTC),
            "theme": self.cookies.theme(request),
        }

    def _actor(self, request: Request, session: ConsoleSession) -> Actor:
        return session.actor(self._dependencies.addresses.of(request), request_id_of(request.scope))


@cache
def result_type(returns: Any) -> TypeAdapter[Any]:
    """Return what writes the result of a form as JSON, and reads it for a form that is sent again."""
    return TypeAdapter(returns)


def repeatable_of(request: Request, session: ConsoleSession, form: Form) -> RepeatableRequest | None:
    """Return the identity of a form: its author, the key it was rendered with, and what was sent; None without a key."""
    if form.idempotency_key is None:
        return None
    return RepeatableRequest(
        caller=f"user:{session.user_id}",
        key=form.idempotency_key,
        route=f"{request.method} {request.url.path}",
        body_sha256=form.sha256,
        tenant_id=session.tenant_id,
    )


def _counts(session: ConsoleSession | None) -> dict[str, int]:
    """Return what navigation counts, by the paths of its entries."""
    if session is None or session.tenant_id is None:
        return {}
    return {f"{TENANT_PATH}/adapters": session.adapters, f"{TENANT_PATH}/keys": session.keys}


def is_htmx(request: Request) -> bool:
    """Return whether htmx sent the request, for a part of a page."""
    return request.headers.get("hx-request") == "true"


def redirect(request: Request, location: str) -> Response:
    """Send the browser to a path of this server: 303, or the header by which htmx opens a page."""
    if is_htmx(request):
        return Response(headers={"hx-redirect": quote(location, safe=_ADDRESS)})
    return RedirectResponse(location, 303)


def page_within(area: Area, page: str) -> str:
    """Return `page` if it is an address of the area, else the area's first page: no other site is ever opened from here."""
    first = FIRST_PAGE[area]
    return page if page == first or page.startswith((f"{first}/", f"{first}?")) else first


def sign_in_address(request: Request) -> str:
    """Return the address of the sign-in page that leads back to the page of the request."""
    first = FIRST_PAGE[area_of(request)]
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    if request.method != "GET" or is_htmx(request) or here == first:
        return f"{first}/sign-in"
    return f"{first}/sign-in?{urlencode({'next': here})}"


def _scope_missing(scope: str, session: ConsoleSession) -> str:
    if session.viewing_as_operator:
        return "You look into this tenant as an operator: nothing can be changed here."
    return f"This page needs the scope {scope}, which your role, {session.role}, has not."
