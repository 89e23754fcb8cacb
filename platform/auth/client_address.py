"""Where a request comes from. Invariant: `X-Forwarded-For` is believed only as far as trusted proxies wrote it, read from
its end, where the nearest proxy writes; what a client writes itself decides nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from loraplex.tenants.api_keys.networks import Address, Network, is_within, parse_address

HEADER = "x-forwarded-for"


@dataclass(frozen=True, slots=True)
class ClientAddresses:
    """`trusted`: the networks of the proxies before this server; none by default."""

    trusted: Sequence[Network] = ()

    def of(self, request: Request) -> str | None:
        """The client's address; None when it is unknown, as behind a proxy that names none that can be read."""
        address = None if request.client is None else parse_address(request.client.host)
        for hop in reversed(forwarded(request.headers.getlist(HEADER))):
            if not is_within(address, self.trusted):
                break
            address = hop_address(hop)
        return None if address is None else str(address)


def forwarded(headers: Sequence[str]) -> list[str]:
    return [hop.strip() for header in headers if header.strip() for hop in header.split(",")]


def hop_address(text: str) -> Address | None:
    """An address as proxies write it: bare, `address:port`, `[address]` or `[address]:port`."""
    if text.startswith("["):
        return parse_address(text[1:].partition("]")[0])
    return parse_address(text.partition(":")[0] if text.count(":") == 1 else text)
