"""Bounds the open connections of a listener, per client address and in total, below this process's limit of open files.

Invariant: a connection over a bound is closed before a byte of it is read. At the bound in total, an idle connection is evicted for a
client with fewer connections, so that clients which send nothing never keep others out.
"""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import structlog

from loraplex.platform.startup_errors import MachineUnfit
from loraplex.tenants.api_keys.networks import Network, client_network, is_within, parse_address

DESCRIPTOR_RESERVE: Final = 512
"""Open files that are left to stores, engines, uploads and worker processes."""
MIN_CONNECTIONS: Final = 64
"""With room for fewer, a gateway does not start."""
ADDRESSES_PARSED: Final = 4096
WARNING_INTERVAL_S: Final = 60.0

Bound: TypeAlias = Literal["address", "total"]


def ignore_refusal(bound: Bound, address: str) -> None:
    """Record nothing."""


@dataclass(eq=False, slots=True)
class Place:
    """The place of one connection of `client`. `evict` must close the connection at once, without `release`."""

    client: str | None
    evict: Callable[[], None]


@dataclass(slots=True)
class _Client:
    connections: int = 0
    idle: dict[Place, None] = field(default_factory=dict)


class ConnectionLimiter:
    """Counts connections by client address; `trusted` proxies, whose clients are many, are bounded in total only.

    A client has at most as many connections as are free. Beyond that, the newest idle connection of the client with the
    most connections is evicted, if that client then still has no fewer. A connection is idle without a request in progress.
    """

    def __init__(
        self,
        max_total: int,
        max_per_address: int,
        trusted: Sequence[Network] = (),
        on_refused: Callable[[Bound, str], None] = ignore_refusal,
    ) -> None:
        self._max_total = max_total
        self._max_per_address = max_per_address
        self._on_refused = on_refused
        self._clients: dict[str, _Client] = {}
        self._client_of = lru_cache(maxsize=ADDRESSES_PARSED)(
            lambda address: counted_client(address, trusted)
        )
        self.open_connections = 0

    def acquire(self, address: str, evict: Callable[[], None]) -> Place | None:
        """Count one more connection of `address`, which is idle. None if it is over a bound, otherwise `release` is due."""
        client = self._client_of(address)
        bound = self._exceeded(client)
        if bound is not None:
            self._on_refused(bound, address)
            if bound == "address" or not self._make_room(client):
                return None
        place = Place(client, evict)
        self.open_connections += 1
        if client is not None:
            self._clients.setdefault(client, _Client()).connections += 1
        self.set_idle(place)
        return place

    def set_busy(self, place: Place) -> None:
        """Keep the connection: a request of it is in progress."""
        if place.client is not None:
            self._clients[place.client].idle.pop(place, None)

    def set_idle(self, place: Place) -> None:
        """Let the connection be evicted from now on."""
        if place.client is not None:
            self._clients[place.client].idle[place] = None

    def release(self, place: Place) -> None:
        """Count a connection as closed."""
        self.open_connections -= 1
        if place.client is not None:
            self.set_busy(place)
            self._clients[place.client].connections -= 1
            if not self._clients[place.client].connections:
                del self._clients[place.client]

    def _exceeded(self, client: str | None) -> Bound | None:
        """Return the bound that one more connection would exceed."""
        count = self._count(client)
        if count >= self._max_per_address:
            return "address"
        return "total" if count >= self._max_total - self.open_connections else None

    def _make_room(self, client: str | None) -> bool:
        """Close one connection for one of `client`. False if no larger client has an idle one."""
        own = self._count(client) + 1
        larger = [each for each in self._clients.values() if each.idle and each.connections > own]
        if not larger:
            return False
        newest = next(reversed(max(larger, key=lambda each: each.connections).idle))
        self.release(newest)
        newest.evict()
        return True

    def _count(self, client: str | None) -> int:
        return self._clients[client].connections if client in self._clients else 0


class RefusalRecorder:
    """Counts refusals with `count`, and warns at most once a minute of an address at its bound: it may be a proxy's."""

    def __init__(self, count: Callable[[Bound], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._next_warning: float | None = None

    def __call__(self, bound: Bound, address: str) -> None:
        self._count(bound)
        if bound == "address" and (self._next_warning is None or self._clock() >= self._next_warning):
            self._next_warning = self._clock() + WARNING_INTERVAL_S
            structlog.get_logger("loraplex.serve").warning(
                "an address has all the connections it may; if it is a proxy's, add it to trusted_proxies",
                address=address,
            )


def counted_client(address: str, trusted: Sequence[Network]) -> str | None:
    """Return what connections are counted by, see `client_network`; None for trusted proxies and unix sockets."""
    parsed = parse_address(address)
    return None if parsed is None or is_within(parsed, trusted) else client_network(address)


def reserve_descriptors(connections: int) -> int:
    """Raise this process's soft limit of open files for `connections`. Returns how many of them fit below the hard limit.

    Raises `MachineUnfit` where fewer than `MIN_CONNECTIONS` do.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + DESCRIPTOR_RESERVE
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return connections
    least = DESCRIPTOR_RESERVE + min(connections, MIN_CONNECTIONS)
    if soft < least:
        raise MachineUnfit(
            f"this process may open {soft} files; a gateway needs {least}, and {needed} for its `max_connections`: raise the "
            "hard limit by `ulimit -Hn`, or by LimitNOFILE= of its systemd unit"
        )
    return min(connections, soft - DESCRIPTOR_RESERVE)
