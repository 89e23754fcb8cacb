"""HEAD on every route that answers GET: authorized, counted and answered as that, without the body."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware: the application is asked for GET. The server's own scope still says HEAD, so it sends no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, send)
        finally:
            # Observers read the route that was found.
            scope.update(asked, method="HEAD")
