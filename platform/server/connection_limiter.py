"""Bounds the open connections of a listener, per client address and in total, below this process's limit of open files.

Invariant: a connection over a bound is closed before a byte of it is read. A client has at most as many connections as are free,
so that a few clients never take all of them.
"""

import resource
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Network
from typing import Final, Literal, TypeAlias

from loraplex.tenants.api_keys.networks import Network, is_within, parse_address

DESCRIPTOR_RESERVE: Final = 512
"""Open files that are left to stores, engines, uploads and worker processes."""
IPV6_CLIENT_BITS: Final = 64
"""One client commonly has a whole /64 of IPv6 addresses (RFC 6177)."""
ADDRESSES_PARSED: Final = 4096

Bound: TypeAlias = Literal["address", "total"]


def ignore_refusal(bound: Bound) -> None:
    """Record nothing."""


class ConnectionLimiter:
    """Counts connections by client address; `trusted` proxies, whose clients are many, are bounded in total only."""

    def __init__(
        self,
        max_total: int,
        max_per_address: int,
        trusted: Sequence[Network] = (),
        on_refused: Callable[[Bound], None] = ignore_refusal,
    ) -> None:
        self._max_total = max_total
        self._max_per_address = max_per_address
        self._on_refused = on_refused
        self._by_client: Counter[str] = Counter()
        self._client_of = lru_cache(maxsize=ADDRESSES_PARSED)(lambda address: client_of(address, trusted))
        self.open_connections = 0

    def acquire(self, address: str) -> bool:
        """Count one more connection of `address`, for which `release` is due. False if it is over a bound."""
        client = self._client_of(address)
        bound = self._exceeded(client)
        if bound is not None:
            self._on_refused(bound)
            return False
        if client is not None:
            self._by_client[client] += 1
        self.open_connections += 1
        return True

    def _exceeded(self, client: str | None) -> Bound | None:
        """Return the bound that one more connection would exceed."""
        free = self._max_total - self.open_connections
        count = 0 if client is None else self._by_client[client]
        if count >= self._max_per_address:
            return "address"
        return "total" if count >= free else None

    def release(self, address: str) -> None:
        """Count a connection of `address` as closed."""
        self.open_connections -= 1
        client = self._client_of(address)
        if client is not None:
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]


def client_of(address: str, trusted: Sequence[Network]) -> str | None:
    """Return what connections are counted by: an IPv4 address or an IPv6 /64; None for trusted proxies and unix sockets."""
    parsed = parse_address(address)
    if parsed is None or is_within(parsed, trusted):
        return None
    if isinstance(parsed, IPv4Address):
        return str(parsed)
    return str(IPv6Network((int(parsed), IPV6_CLIENT_BITS), strict=False))


def reserve_descriptors(connections: int) -> int:
    """Raise this process's soft limit of open files for `connections`. Returns how many of them fit below the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + DESCRIPTOR_RESERVE
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return connections
    return max(1, min(connections, soft - DESCRIPTOR_RESERVE))
