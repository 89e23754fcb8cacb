"""The last handler of errors: an application that raises still answers, in its own form."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Respond: TypeAlias = Callable[[Request, Exception], Awaitable[Response]]


class ErrorBoundary:
    """ASGI middleware: answers an unexpected error by `respond`, unless a response has already begun."""

    def __init__(self, app: ASGIApp, respond: Respond) -> None:
        self._app = app
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_mark(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_mark)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await (await self._respond(Request(scope), error))(scope, receive, send)
