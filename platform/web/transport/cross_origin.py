"""CORS of `/v1` for the origins that the setting `allowed_origins` names: pages of a browser may call it with a key.

Invariant: no other plane answers another origin, and no response allows credentials, so cookies of the console never count.
"""

from collections.abc import Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX: Final = "/v1/"
METHODS: Final = ("GET", "POST")
MAX_AGE_S: Final = 600
EVERY: Final = "*"
"""As a request header each that a preflight names, `authorization` among them; as a response header those of any name, such as
`x-request-id`, `x-ratelimit-*` and `x-loraplex-*` (Fetch, "CORS protocol and HTTP caches"; only without credentials)."""


class CrossOrigin:
    """ASGI middleware: answers preflights without a key, and lets `origins` read the responses of `/v1`."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._shared = CORSMiddleware(
            app, origins, METHODS, allow_headers=[EVERY], expose_headers=[EVERY], max_age=MAX_AGE_S
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_shared = scope["type"] == "http" and scope["path"].startswith(PREFIX)
        await (self._shared if is_shared else self._app)(scope, receive, send)
