"""Connections are counted by IPv4 address and IPv6 /64; those of trusted proxies in total only; descriptors are reserved."""

import resource
from functools import partial

import pytest
from structlog.testing import capture_logs

from loraplex.platform.server.connection_limiter import (
    DESCRIPTOR_RESERVE,
    MIN_CONNECTIONS,
    Bound,
    ConnectionLimiter,
    Place,
    RefusalRecorder,
    reserve_descriptors,
)
from loraplex.platform.startup_errors import MachineUnfit
from loraplex.tenants.api_keys.networks import parse_network


class Connections:
    """Opens connections at a limiter, and lists those that gave way."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self.limiter = limiter
        self.gave_way: list[str] = []

    def open(self, address: str, busy: bool = False) -> Place | None:
        place = self.limiter.acquire(address, lambda: self.gave_way.append(address))
        if place is not None and busy:
            self.limiter.set_busy(place)
        return place

    def fill(self, address: str, busy: bool = False) -> int:
        """Open connections of `address` until one is refused, and return how many there are."""
        count = 0
        while self.open(address, busy) is not None:
            count += 1
        return count


def are_taken(limiter: ConnectionLimiter, *addresses: str) -> list[bool]:
    connections = Connections(limiter)
    return [connections.open(address) is not None for address in addresses]


def test_one_client_is_bounded_by_its_address() -> None:
    limiter = ConnectionLimiter(10, 2)
    first = limiter.acquire("192.0.2.1", lambda: None)
    assert first is not None
    assert are_taken(limiter, "192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2") == [True, False, True]
    limiter.release(first)
    assert are_taken(limiter, "::ffff:192.0.2.1") == [True] and limiter.open_connections == 3


def test_the_addresses_of_one_ipv6_client_count_together() -> None:
    limiter = ConnectionLimiter(10, 2)
    addresses = ("2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8:0:1::1")
    assert are_taken(limiter, *addresses) == [True, True, False, True]
    translated = ("64:ff9b::192.0.2.1", "64:ff9b::192.0.2.1", "192.0.2.1", "64:ff9b::192.0.2.2")
    assert are_taken(limiter, *translated) == [True, True, False, True]


def test_a_few_busy_clients_never_take_all_connections() -> None:
    connections = Connections(ConnectionLimiter(4096, 4096))
    taken = [connections.fill(f"192.0.2.{client}", busy=True) for client in range(10)]
    assert taken == [2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4]
    assert connections.open("198.51.100.1") is not None


def test_a_newcomer_takes_the_place_of_an_idle_connection() -> None:
    connections = Connections(ConnectionLimiter(4096, 256))
    silent = [f"192.0.2.{client}" for client in range(16)]
    for address in silent:
        connections.fill(address)
    while connections.limiter.open_connections < 4096:
        assert connections.open(f"198.51.100.{4096 - connections.limiter.open_connections}") is not None
    connections.gave_way.clear()
    assert connections.fill("203.0.113.1") > 100
    assert connections.limiter.open_connections == 4096
    assert set(connections.gave_way) <= set(silent)


def test_the_newest_idle_connection_of_the_largest_client_gives_way() -> None:
    gave_way: list[int] = []
    limiter = ConnectionLimiter(6, 3)
    busy, idle = ["192.0.2.1"] * 3, ["192.0.2.2"] * 2
    for number, address in enumerate([*busy, *idle, "192.0.2.3"]):
        place = limiter.acquire(address, partial(gave_way.append, number))
        assert place is not None
        if address in busy:
            limiter.set_busy(place)
    assert are_taken(limiter, "192.0.2.4") == [True] and gave_way == [4]
    assert are_taken(limiter, "192.0.2.5") == [False] and limiter.open_connections == 6


def test_trusted_proxies_and_unix_sockets_are_bounded_in_total_only() -> None:
    limiter = ConnectionLimiter(6, 2, [parse_network("10.0.0.0/8")])
    places = [limiter.acquire(address, lambda: None) for address in ("10.1.2.3", "") * 3]
    assert are_taken(limiter, "10.1.2.3", "192.0.2.1") == [False, False]
    for place in places:
        assert place is not None
        limiter.release(place)
    assert limiter.open_connections == 0


def test_an_address_at_its_bound_is_named_once_a_minute() -> None:
    now = [0.0]
    counted: list[Bound] = []
    recorder = RefusalRecorder(counted.append, lambda: now[0])
    with capture_logs() as logs:
        recorder("total", "192.0.2.100")
        for second in (0, 59, 60):
            now[0] = float(second)
            recorder("address", f"192.0.2.{second}")
    assert [line["address"] for line in logs] == ["192.0.2.0", "192.0.2.60"]
    assert "trusted_proxies" in logs[0]["event"] and counted == ["total", "address", "address", "address"]


@pytest.mark.parametrize(
    ("limits", "wanted", "raised", "fitting"),
    [
        ((1024, 524_288), 4096, (4096 + DESCRIPTOR_RESERVE, 524_288), 4096),
        ((1024, 2048), 4096, (2048, 2048), 2048 - DESCRIPTOR_RESERVE),
        ((1024, resource.RLIM_INFINITY), 4096, (4096 + DESCRIPTOR_RESERVE, resource.RLIM_INFINITY), 4096),
        ((524_288, 524_288), 4096, None, 4096),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 4096, None, 4096),
    ],
)
def test_descriptors_are_reserved_for_the_connections(
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    wanted: int,
    raised: tuple[int, int] | None,
    fitting: int,
) -> None:
    was_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: was_set.append(values))
    assert reserve_descriptors(wanted) == fitting
    assert was_set == ([] if raised is None else [raised])


@pytest.mark.parametrize(("limit", "wanted", "needed"), [(64, 4096, 576), (575, 4096, 576), (513, 2, 514)])
def test_too_few_descriptors_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, limit: int, wanted: int, needed: int
) -> None:
    limits = [(limit, limit)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: None)
    refusal = f"may open {limit} files; a gateway needs {needed}, .*ulimit -Hn.*LimitNOFILE"
    with pytest.raises(MachineUnfit, match=refusal):
        reserve_descriptors(wanted)
    limits[0] = needed, needed
    assert reserve_descriptors(wanted) == min(wanted, MIN_CONNECTIONS)
