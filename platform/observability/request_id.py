"""Gives every request an id: the client's `x-request-id` if it is harmless, else a new one. Every response carries it.

Invariant: the id names a request in logs and responses only; the engine gets ids that no client can choose.
"""

import re
from typing import Final
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = "x-request-id"
_RAW_HEADER: Final = HEADER.encode()
_HARMLESS: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestIds:
    """ASGI middleware: sets the request id and adds `response_headers_of` the request to its response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        requested = next((value for name, value in scope["headers"] if name == _RAW_HEADER), b"")
        request_id = requested.decode() if _HARMLESS.fullmatch(requested) else uuid4().hex
        headers: dict[str, str] = {HEADER: request_id}
        scope.setdefault("state", {}).update(request_id=request_id, response_headers=headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = {
                    name.lower().encode("latin-1"): text.encode("latin-1") for name, text in headers.items()
                }
                kept = (each for each in message.get("headers", ()) if each[0] not in added)
                message = {**message, "headers": [*kept, *added.items()]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    """Return the id that the middleware chose."""
    request_id: str = scope["state"]["request_id"]
    return request_id


def response_headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers that go out with any response to this request. Add to them before the response begins."""
    headers: dict[str, str] = scope["state"]["response_headers"]
    return headers
