"""The console as an application of its own, beside the API in one gateway: its errors are pages, its headers its own."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from loraplex.platform.error_boundary import ErrorBoundary
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.schema_check import SchemaChecks
from loraplex.platform.static_files import StaticFiles
from loraplex.platform.tenant_limiter import TenantLimiter
from loraplex.platform.web.console.allowed_hosts import AllowedHosts, allowed_names
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.error_pages import ErrorPages
from loraplex.platform.web.console.origin import PublicOrigin
from loraplex.platform.web.console.security_headers import SecurityHeaders
from loraplex.platform.web.console.templating import Templates
from loraplex.platform.web.page_routes import page_routers

STATIC: Final = Path(__file__).parent / "console" / "static"
STATIC_PREFIX: Final = "/console/static"
AREAS: Final = ("/console", "/operator/console")
MIN_COMPRESSED_BYTES: Final = 1000


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """`public_url`: the address that people use, without a slash at the end; None: that of each request.

    `is_local`: no other machine reaches this server but through a proxy. `is_demo`: the playground begins at temperature 0, and
    the overview says what is a sample.
    """

    public_url: str | None = None
    is_local: bool = False
    is_demo: bool = False


def add_console(app: FastAPI, dependencies: GatewayDependencies, options: ConsoleOptions) -> None:
    """Let a console answer before all routes of `app`, so that no page is compared with every route of the API.

    Of `/` it takes what browsers ask for.
    """
    app.router.routes.insert(0, ConsoleRoute(create_console(dependencies, options)))


def create_console(dependencies: GatewayDependencies, options: ConsoleOptions) -> FastAPI:
    """Build the application of all pages, with absolute paths."""
    static, templates = _assets()
    origin = PublicOrigin(options.public_url, dependencies.addresses)
    endpoint = ConsoleEndpoint(dependencies, templates, origin, is_demo=options.is_demo)
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.endpoint, app.state.origin = endpoint, origin
    # It keeps what it planned for a tenant.
    app.state.schema_checks = SchemaChecks(dependencies)
    # A replay takes a connection, and up to a second of the processor beside all requests.
    app.state.replays = TenantLimiter("replays", total=2, per_tenant=1, waiting=3)
    app.add_route(f"{STATIC_PREFIX}/{{name:path}}", static.send)
    for router in page_routers(dependencies):
        # Included, a router would build each of its routes a second time, with the first request.
        app.router.routes.extend(router.routes)
    names = allowed_names(options.public_url, is_local=options.is_local)
    if names is not None:
        app.add_middleware(AllowedHosts, names=names)
    _show_errors(app, endpoint)
    app.add_middleware(GZipMiddleware, minimum_size=MIN_COMPRESSED_BYTES, compresslevel=6)
    app.add_middleware(SecurityHeaders)
    return app


@cache
def _assets() -> tuple[StaticFiles, Templates]:
    """Read the static files, and compile each template, once a process: they are the same in every console."""
    static = StaticFiles(STATIC, STATIC_PREFIX)
    return static, Templates(static)


def _show_errors(app: FastAPI, endpoint: ConsoleEndpoint) -> None:
    pages = ErrorPages(endpoint)
    app.add_exception_handler(HTTPException, pages.respond)
    app.add_exception_handler(RequestValidationError, pages.respond)
    app.add_middleware(ErrorBoundary, respond=pages.respond)


class ConsoleRoute(BaseRoute):
    """A route of the gateway that hands everything below `AREAS`, and `/` for browsers, to the console, with its path unchanged."""

    def __init__(self, console: FastAPI) -> None:
        self._console = console

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether a request is the console's."""
        path = scope.get("path", "")
        is_ours = scope["type"] == "http" and (
            any(path == area or path.startswith(f"{area}/") for area in AREAS)
            or (path == "/" and "text/html" in Headers(scope=scope).get("accept", ""))
        )
        return (Match.FULL if is_ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the console answer."""
        await self._console(scope, receive, send)
