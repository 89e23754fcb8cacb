"""Addresses to which events may be sent. Invariant: a URL is parsed here alone, and an address of a special-purpose network
is never public, however it is written.
"""

import re
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from typing import Final

from loraplex.tenants.api_keys.networks import Address
from loraplex.tenants.errors import InvalidField

MAX_URL_LENGTH: Final = 2048
MIN_PORT: Final = 1024
"""Least port besides the one of the scheme: lower ones belong to services that are no receivers."""
MAX_PORT: Final = 65_535
SCHEME_PORTS: Final = {"https": 443, "http": 80}
# Without user, fragment, backslash or any character that two parsers could read differently.
_URL: Final = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[1-9][0-9]{0,4}))?"
    r"(?P<path>(?:/[A-Za-z0-9!$%&'()*+,./:;=?@_~-]*)?)"
)
# The registries of IANA for special-purpose addresses, the deprecated 6to4 relays (RFC 7526), multicast and reserved.
SPECIAL4: Final = tuple(
    map(
        IPv4Network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        ),
    )
)
# All global unicast addresses. Loopback, mapped IPv4 (::ffff:0:0/96), NAT64 (64:ff9b::/96 and 64:ff9b:1::/48), local,
# link-local and multicast are outside.
UNICAST6: Final = IPv6Network("2000::/3")
# Protocol assignments with Teredo, documentation, and 6to4, which contains an IPv4 address.
SPECIAL6: Final = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))


@dataclass(frozen=True, slots=True)
class ReceiverUrl:
    """The parts of a checked URL. `host`: a name or an address, without brackets; `path` begins with `/`."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """What the `Host` header names."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == SCHEME_PORTS[self.scheme] else f"{host}:{self.port}"


def parse_receiver_url(url: str, *, allow_private: bool, field: str = "url") -> ReceiverUrl:
    """Parse and check the URL of a receiver. `allow_private`: any address, and `http` too.

    Raises `InvalidField` that names `field`. A name is not resolved here: each delivery checks the addresses that it gets.
    """
    match = _URL.fullmatch(url) if len(url) <= MAX_URL_LENGTH else None
    if match is None:
        raise InvalidField(
            field,
            f"`{field}` must be a URL like https://example.com/hooks of at most {MAX_URL_LENGTH} ASCII characters, without"
            " user, password and fragment",
        )
    scheme, host = match["scheme"], match["host"].strip("[]")
    if scheme == "http" and not allow_private:
        raise InvalidField(field, f"`{field}` must begin with https://")
    port = int(match["port"] or SCHEME_PORTS[scheme])
    if port != SCHEME_PORTS[scheme] and not MIN_PORT <= port <= MAX_PORT:
        raise InvalidField(
            field,
            f"`{field}` has port {port}; allowed: {SCHEME_PORTS[scheme]} and {MIN_PORT} to {MAX_PORT}",
        )
    address = parse_literal(host)
    if match["host"].startswith("[") and (address is None or address.version == 4):
        raise InvalidField(field, f"`{field}` has no valid address in its brackets")
    is_local = is_local_name(host) if address is None else not is_public(address)
    if is_local and not allow_private:
        raise InvalidField(
            field, f"`{field}` is a private or reserved address; allowed: public addresses and names"
        )
    return ReceiverUrl(scheme, host, port, match["path"] or "/")


def parse_literal(text: str) -> Address | None:
    """Parse an address and drop the name of its interface; None for text that is no address. An IPv4 address mapped into
    IPv6 stays an IPv6 address, which is not public.
    """
    try:
        return ip_address(text.partition("%")[0])
    except ValueError:
        pass
    try:
        # As resolvers read it: decimal, octal and hexadecimal numbers, and fewer than four of them (`0`, `127.1`).
        return IPv4Address(socket.inet_aton(text))
    except (OSError, ValueError):
        return None


def is_local_name(name: str) -> bool:
    """Whether no public receiver can have the name: one without a dot, as hosts files and search domains have, or RFC 6761."""
    labels = name.lower().removesuffix(".").split(".")
    return len(labels) == 1 or labels[-1] == "localhost"


def is_public(address: Address) -> bool:
    """Whether the address is one of the public internet."""
    if address.version == 4:
        return not any(address in network for network in SPECIAL4)
    return address in UNICAST6 and not any(address in network for network in SPECIAL6)
