"""One id per request: a client's own `x-request-id` if it is harmless, else a new one; it is on every answer.

Invariant: the id names a request in logs and answers only; the engine gets ids of its own, which no client chooses.
"""

import re
from typing import Final
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = "x-request-id"
_HARMLESS: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestIds:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(HEADER, "")
        request_id = asked if _HARMLESS.fullmatch(asked) else uuid4().hex
        headers: dict[str, str] = {HEADER: request_id}
        scope.setdefault("state", {}).update(request_id=request_id, answer_headers=headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    """The id the middleware chose."""
    request_id: str = scope["state"]["request_id"]
    return request_id


def answer_headers_of(scope: Scope) -> dict[str, str]:
    """Headers that go out with the answer, whatever it is: what is added before it begins is among them."""
    headers: dict[str, str] = scope["state"]["answer_headers"]
    return headers
