"""Headers of every response of the console. Invariant: a page loads, sends to and is framed by nothing but this server."""

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    # The origin of a form is compared: `no-referrer` would hide it.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
HTTPS_HEADERS: Final = {**HEADERS, "strict-transport-security": "max-age=31536000"}


class SecurityHeaders:
    """ASGI middleware: adds `HEADERS` where a response has none of its own, and forbids to store what names no cache.

    Where this server itself ends TLS, browsers are asked to use nothing else; behind a proxy that is the proxy's choice.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        added = HTTPS_HEADERS if scope.get("scheme") == "https" else HEADERS

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**added, "cache-control": "no-store"}.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_secured)
