"""Serves the routes that most requests use without the framework's routing, dependencies and exit stacks.

Invariant: such a route is also a route of the framework, which documents it and serves what is not matched exactly.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Handle: TypeAlias = Callable[[Request], Awaitable[Response]]
METHOD: Final = "POST"


@dataclass(frozen=True, slots=True)
class DirectRoute:
    """`handle` answers as the framework's `endpoint` does, by which metrics and access lines know the route."""

    endpoint: Callable[..., Any]
    handle: Handle


class DirectRoutes:
    """ASGI middleware next to the router: calls `routes` by their exact path. Errors are answered by what surrounds it."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, DirectRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._routes.get(scope.get("path", ""))
        if found is None or scope.get("method") != METHOD or scope.get("root_path"):
            await self._app(scope, receive, send)
            return
        scope["endpoint"] = found.endpoint
        response = await found.handle(Request(scope, receive, send))
        await response(scope, receive, send)
