"""Connections are counted by IPv4 address and IPv6 /64; those of trusted proxies in total only; descriptors are reserved."""

import resource

import pytest

from loraplex.platform.server.connection_limiter import (
    DESCRIPTOR_RESERVE,
    ConnectionLimiter,
    reserve_descriptors,
)
from loraplex.tenants.api_keys.networks import parse_network


def test_one_client_is_bounded_by_its_address() -> None:
    limiter = ConnectionLimiter(10, 2)
    assert [limiter.acquire("192.0.2.1") for _ in range(3)] == [True, True, False]
    assert [limiter.acquire("::ffff:192.0.2.1"), limiter.acquire("192.0.2.2")] == [False, True]
    limiter.release("192.0.2.1")
    assert limiter.acquire("::ffff:192.0.2.1") and limiter.open_connections == 3


def test_the_addresses_of_one_ipv6_client_count_together() -> None:
    limiter = ConnectionLimiter(10, 2)
    assert [limiter.acquire(f"2001:db8::{number}") for number in range(3)] == [True, True, False]
    assert limiter.acquire("2001:db8:0:1::1")


def test_a_few_clients_never_take_all_connections() -> None:
    limiter, taken = ConnectionLimiter(4096, 4096), []
    for client in range(10):
        taken.append(0)
        while limiter.acquire(f"192.0.2.{client}"):
            taken[-1] += 1
    assert taken == [2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4]
    assert limiter.acquire("198.51.100.1")


def test_trusted_proxies_and_unix_sockets_are_bounded_in_total_only() -> None:
    limiter = ConnectionLimiter(6, 2, [parse_network("10.0.0.0/8")])
    assert all(limiter.acquire("10.1.2.3") for _ in range(3))
    assert all(limiter.acquire("") for _ in range(3))
    assert not limiter.acquire("10.1.2.3") and not limiter.acquire("192.0.2.1")
    for address in ("10.1.2.3", "") * 3:
        limiter.release(address)
    assert limiter.open_connections == 0


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
