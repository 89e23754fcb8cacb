"""Serves the routes that most requests use without the framework: its layers, routing, dependencies and exit stacks.

Invariant: such a route is also a route of the framework, which documents it and serves what is not matched exactly, with the
same response.
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
    """The requests for `routes`, by their exact path. `around` is what every request of the application passes."""

    def __init__(self, routes: Mapping[str, DirectRoute], around: Callable[[ASGIApp], ASGIApp]) -> None:
        self._routes = routes
        self.app = around(self._serve)

    def match(self, scope: Scope) -> bool:
        """Return whether `app` serves the request."""
        path, method = scope.get("path"), scope.get("method")
        return path in self._routes and method == METHOD and not scope.get("root_path")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._routes[scope["path"]]
        scope["endpoint"] = found.endpoint
        response = await found.handle(Request(scope, receive, send))
        await response(scope, receive, send)
