"""What all pages of the console share: who is signed in, the tries of client networks, templates and cookies, and where browsers go."""

import math
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from loraplex.platform.auth.failure_buckets import REFILL_S, FailureBuckets
from loraplex.platform.errors import FormRefused, InsufficientScope
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.observability.request_id import request_id_of
from loraplex.platform.web.console.cookies import OPERATOR_PATH, TENANT_PATH, Cookies, area_of
from loraplex.platform.web.console.csrf import is_token, masked
from loraplex.platform.web.console.forms import CSRF_HEADER
from loraplex.platform.web.console.navigation import OPERATOR_AREA, TENANT_AREA, navigation
from loraplex.platform.web.console.origin import PublicOrigin
from loraplex.platform.web.console.templating import Templates
from loraplex.platform.web.cursors import CURSOR_DOMAIN
from loraplex.platform.web.runner import Runner
from loraplex.tenants.api_keys.networks import client_network
from loraplex.tenants.errors import SignInSlowed
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.people.sessions import Area, find_session

FIRST_PAGE: Final[dict[Area, str]] = {"tenant": TENANT_PATH, "operator": OPERATOR_PATH}
# The characters of an address (RFC 3986), with those that are encoded already: a line break would begin another header.
_ADDRESS: Final = ":/%#?=@[]!$&'()*+,;"


LOOKING: Final = (
    "You look into this tenant as an operator, read-only: nothing can be changed here. A person of the tenant whose role allows it "
    "can do this. “Leave” above ends the look; in your own area you may do what is an operator's."
)


class SignInNeeded(Exception):
    """The request has no session, or one that ended."""


class PageElsewhere(Exception):
    """The browser is sent to `location`, a path of this server, in place of what it asked for."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.location = location


class ConsoleEndpoint:
    """One for all pages of this server."""

    def __init__(
        self,
        dependencies: GatewayDependencies,
        templates: Templates,
        origin: PublicOrigin,
        *,
        is_demo: bool = False,
    ) -> None:
        self.dependencies = dependencies
        self.templates = templates
        self.runner = Runner(dependencies, "pages")
        self.cursor_key = dependencies.derive_key(CURSOR_DOMAIN)
        self.origin = origin
        self.is_demo = is_demo
        self._tries = FailureBuckets()

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
            token = Cookies(self.origin, request).session_token()
            database, area = self.dependencies.database, area_of(request)
            found = None if token is None else await find_session(database, token, area)
            request.state.console_session = found
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
        return client_network(self.dependencies.addresses.of(request))

    def context(self, request: Request, session: ConsoleSession | None) -> dict[str, Any]:
        """Return the variables that the template of every page reads."""
        path, area = request.url.path, area_of(request)
        groups = OPERATOR_AREA if area == "operator" else TENANT_AREA
        scopes = frozenset[str]() if session is None else session.scopes
        provider = self.dependencies.identity_provider
        return {
            "session": session,
            "nav": navigation(groups, scopes, path, _counts(session)),
            "area": area,
            "home": FIRST_PAGE[area],
            "request_path": path,
            "request_id": request_id_of(request.scope),
            "public_host": self.origin.host(request),
            "base_url": f"{self.origin.of(request)}/v1",
            "served_model": self.dependencies.served_model_name,
            "can_mail": self.dependencies.mailed_links is not None,
            "provider_name": None if provider is None else provider.name,
            "csrf": None if session is None else masked(session.csrf_token),
            "now": datetime.now(UTC),
            "theme": Cookies(self.origin, request).theme(),
        }


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
        return LOOKING
    return f"This page needs the scope {scope}, which your role, {session.role}, has not."
