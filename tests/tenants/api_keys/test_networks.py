"""Networks: one spelling each, whichever way they and the addresses in them are written."""

from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.api_keys.networks import (
    MAX_NETWORKS,
    UNKNOWN,
    are_covered,
    check_networks,
    client_network,
    is_within,
    parse_address,
    parse_network,
)
from loraplex.tenants.errors import InvalidField


@pytest.mark.parametrize(
    ("address", "networks", "within"),
    [
        ("10.1.2.3", ["10.0.0.0/8"], True),
        ("11.1.2.3", ["10.0.0.0/8"], False),
        ("::ffff:10.1.2.3", ["10.0.0.0/8"], True),
        ("10.1.2.3", ["::ffff:10.0.0.0/104"], True),
        ("::ffff:a01:203", ["10.1.2.3"], True),
        ("2001:db8::1", ["2001:db8::/32"], True),
        ("2001:db9::1", ["2001:db8::/32"], False),
        ("fe80::1%eth0", ["fe80::/10"], True),
        ("10.1.2.3", ["::/0"], False),
        ("2001:db8::1", ["0.0.0.0/0"], False),
        ("2001:db8::1", ["10.0.0.0/8", "2001:db8::1"], True),
        ("10.1.2.3", [], False),
        ("", ["0.0.0.0/0", "::/0"], False),
        ("010.1.2.3", ["0.0.0.0/0"], False),
        ("10.1.2.3\x00", ["0.0.0.0/0"], False),
    ],
)
def test_which_network_holds_which_address(address: str, networks: list[str], within: bool) -> None:
    checked = check_networks("allowed_cidrs", networks)
    assert is_within(parse_address(address), map(parse_network, checked)) is within


def test_an_unknown_address_is_in_no_network() -> None:
    assert not is_within(None, [parse_network("0.0.0.0/0")])


def test_networks_have_one_spelling() -> None:
    given_networks = ["10.0.0.0/08", "::ffff:10.0.0.0/104", "2001:DB8:0::/32", "1.2.3.4", "10.0.0.0/8"]
    assert check_networks("x", given_networks) == ["10.0.0.0/8", "2001:db8::/32", "1.2.3.4/32"]


@pytest.mark.parametrize(
    "text",
    ["", "/", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/255.0.0.0", "10.0.0.0/8/8", "fe80::%1/64"]
    + ["10.0.0", "10.0.0.0/ 8", "a" * 1000, "10.0.0.0/\u0668", "localhost", "::ffff:10.0.0.1/104", "1" * 64],
)
def test_what_is_no_network_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidField, match="allowed_cidrs") as caught:
        check_networks("allowed_cidrs", [text])
    assert caught.value.field == "allowed_cidrs" and len(str(caught.value)) < 300


def test_their_number_is_bounded() -> None:
    many = [f"10.0.{number}.0/24" for number in range(MAX_NETWORKS + 1)]
    assert len(check_networks("x", many[:-1])) == MAX_NETWORKS
    with pytest.raises(InvalidField, match="at most 64"):
        check_networks("x", many)


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_mapped_and_plain_never_disagree(address: IPv4Address, prefix: int) -> None:
    plain = ip_network((address, prefix), strict=False)
    mapped = f"::ffff:{plain.network_address}/{96 + prefix}"
    assert parse_network(mapped) == plain
    assert parse_address(f"::ffff:{address}") == address
    assert is_within(parse_address(f"::ffff:{address}"), [parse_network(mapped)])


@given(st.ip_addresses(v=6), st.integers(0, 128))
def test_a_checked_network_is_read_back_as_it_is(address: IPv6Address, prefix: int) -> None:
    network = str(ip_network((address, prefix), strict=False))
    (checked,) = check_networks("x", [network])
    assert check_networks("x", [checked]) == [checked]


@given(st.text(max_size=80))
def test_any_text_is_a_network_or_refused(text: str) -> None:
    parse_address(text)
    try:
        check_networks("x", [text])
    except InvalidField as error:
        assert error.field == "x"


@pytest.mark.parametrize(
    ("narrow", "wide", "covered"),
    [
        (["10.1.0.0/16"], ["10.0.0.0/8"], True),
        (["10.0.0.0/8"], ["10.1.0.0/16"], False),
        (["10.0.0.0/8"], ["10.0.0.0/9", "10.128.0.0/9"], True),
        (["10.0.0.0/8", "11.0.0.0/8"], ["10.0.0.0/8"], False),
        (["10.0.0.1", "2001:db8::1"], ["2001:db8::/32", "10.0.0.0/8"], True),
        (["::/0"], ["0.0.0.0/0"], False),
        (["0.0.0.0/0"], ["::/0"], False),
        (["::ffff:10.0.0.0/104"], ["10.0.0.0/8"], True),
        (["10.0.0.1"], [], False),
        ([], ["10.0.0.1"], True),
    ],
)
def test_networks_cover_others(narrow: list[str], wide: list[str], covered: bool) -> None:
    assert are_covered(narrow, wide) is covered


@pytest.mark.parametrize(
    ("of", "network"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "2001:db8:1:3::/64"),
        ("64:ff9b::203.0.113.9", "203.0.113.9"),
        ("64:ff9b:0:1::cb00:7109", "64:ff9b:0:1::/64"),
        (None, UNKNOWN),
    ],
)
def test_a_client_is_an_ipv4_address_or_an_ipv6_subscriber(of: str | None, network: str) -> None:
    assert client_network(of) == network
