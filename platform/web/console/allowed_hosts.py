"""The allowed hosts of the console.

Invariant: a page of another site cannot point its own name at this server (DNS rebinding) and then read the console's
answers as if they were its own: a request by a name that is not allowed runs no page.
"""

import re
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.platform.errors import MisdirectedRequest
from loraplex.tenants.api_keys.networks import parse_address

LOCALHOST: Final = "localhost"
_HOST: Final = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")


def allowed_names(public_url: str | None, *, is_local: bool) -> frozenset[str] | None:
    """Return the allowed hosts besides `localhost`: that of `public_url`. None: all are allowed.

    `is_local`: no other machine reaches this server, so it has no names but those of a proxy, which `public_url` says.
    """
    if public_url is not None:
        return frozenset({_name(urlsplit(public_url).netloc)})
    return frozenset() if is_local else None


def is_direct(host: str) -> bool:
    """Return whether a `Host` header has `localhost` or an address, as of a tunnel's end: a page of another site can take neither."""
    name = _name(host)
    return name == LOCALHOST or parse_address(name) is not None


class AllowedHosts:
    """ASGI middleware: refuses requests by other names. Ports are not compared: a tunnel or a proxy has its own."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allows(Headers(scope=scope).getlist("host")):
            raise MisdirectedRequest(
                "The console does not answer by this name. Open it by the address in the setting public_url, by localhost or by an "
                "IP address; where people use another address, its operator sets public_url to it. A proxy must pass on the Host header."
            )
        await self._app(scope, receive, send)

    def _allows(self, hosts: list[str]) -> bool:
        return len(hosts) == 1 and (_name(hosts[0]) in self._names or is_direct(hosts[0]))


def _name(host: str) -> str:
    """Return the name or address in a `Host` header as names are compared; empty where it is none."""
    parts = _HOST.fullmatch(host)
    if parts is None:
        return ""
    return (parts["ipv6"] or parts["name"] or "").lower().removesuffix(".")
