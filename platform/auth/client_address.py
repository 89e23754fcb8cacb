"""Determines the client's address of a request.

Invariant: `X-Forwarded-For` is read from its end, where the nearest proxy writes, and only as far as trusted proxies wrote
it. Entries that a client writes have no effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from starlette.requests import Request

from loraplex.tenants.api_keys.networks import Address, Network, is_within, parse_address

HEADER = "x-forwarded-for"
KNOWN_ADDRESSES: Final = 4096


@dataclass(frozen=True, slots=True)
class ClientAddresses:
    """`trusted`: the networks of the proxies in front of this server; none by default."""

    trusted: Sequence[Network] = ()

    def of(self, request: Request) -> str | None:
        """Return the client's address; None when it is unknown, for example behind a proxy that writes no valid address."""
        client = request.client
        if not self.trusted:
            return None if client is None else _normal_text(client.host)
        address = None if client is None else parse_address(client.host)
        for hop in reversed(forwarded(request.headers.getlist(HEADER))):
            if not is_within(address, self.trusted):
                break
            address = hop_address(hop)
        return None if address is None else str(address)

    def is_proxied(self, request: Request) -> bool:
        """Return whether a trusted proxy sent the request: then its other headers of forwarding count too."""
        return request.client is not None and is_within(parse_address(request.client.host), self.trusted)


@lru_cache(KNOWN_ADDRESSES)
def _normal_text(host: str) -> str | None:
    address = parse_address(host)
    return None if address is None else str(address)


def forwarded(headers: Sequence[str]) -> list[str]:
    return [hop.strip() for header in headers if header.strip() for hop in header.split(",")]


def hop_address(text: str) -> Address | None:
    """Parse an address as proxies write it: bare, `address:port`, `[address]` or `[address]:port`."""
    if text.startswith("["):
        return parse_address(text[1:].partition("]")[0])
    return parse_address(text.partition(":")[0] if text.count(":") == 1 else text)
