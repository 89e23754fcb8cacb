"""The client's address: the peer, or the entries of trusted proxies, never an entry of the client."""

import pytest
from starlette.requests import Request

from loraplex.platform.auth.client_address import ClientAddresses
from loraplex.tenants.api_keys.networks import parse_network


def request_from(peer: str | None, *forwarded: str) -> Request:
    headers = [(b"x-forwarded-for", value.encode("latin-1")) for value in forwarded]
    client = None if peer is None else (peer, 1234)
    return Request({"type": "http", "headers": headers, "client": client})


def address(trusted: str, peer: str | None, *forwarded: str) -> str | None:
    networks = [parse_network(text) for text in trusted.split()]
    return ClientAddresses(networks).of(request_from(peer, *forwarded))


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "expected"),
    [
        ("", "203.0.113.9", ["10.0.0.1"], "203.0.113.9"),
        ("", "::ffff:203.0.113.9", [], "203.0.113.9"),
        ("", "fe80::1%eth0", [], "fe80::1"),
        ("", "testclient", [], None),
        ("", None, ["10.0.0.1"], None),
        ("10.0.0.0/8", "203.0.113.9", ["10.0.0.1"], "203.0.113.9"),
        ("10.0.0.0/8", "10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.0/8", "10.0.0.1", [""], "10.0.0.1"),
        ("10.0.0.0/8", "::ffff:10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.0/8", "10.0.0.1", ["192.0.2.1, 203.0.113.9"], "203.0.113.9"),
        ("10.0.0.0/8", "10.0.0.1", ["192.0.2.1", "203.0.113.9 , 10.0.0.2"], "203.0.113.9"),
        ("10.0.0.0/8", "10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.0/8", "10.0.0.1", ["203.0.113.9:4711"], "203.0.113.9"),
        ("10.0.0.0/8", "10.0.0.1", ["[2001:db8::1]:4711"], "2001:db8::1"),
        ("10.0.0.0/8", "10.0.0.1", ["2001:db8::1"], "2001:db8::1"),
        ("fd00::/8", "fd00::1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.0/8", "10.0.0.1", ["203.0.113.9, unknown"], None),
        ("10.0.0.0/8", "10.0.0.1", ["203.0.113.9,"], None),
        ("10.0.0.0/8", "10.0.0.1", ["\xff\x00" * 1000], None),
    ],
)
def test_whose_word_is_taken(trusted: str, peer: str | None, forwarded: list[str], expected: str) -> None:
    assert address(trusted, peer, *forwarded) == expected
