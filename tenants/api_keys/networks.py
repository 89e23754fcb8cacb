"""Parses IP addresses and networks, and tests which contains which. Invariant: an IPv4 address written as IPv6 (RFC 4291,
2.5.5.2) counts as the IPv4 address, so that its spelling cannot bypass or miss a list of networks.
"""

from collections.abc import Iterable
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    collapse_addresses,
    ip_address,
    ip_network,
)
from typing import Final, TypeAlias

from loraplex.tenants.errors import InvalidField

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

MAX_NETWORKS: Final = 64
MAX_LENGTH: Final = 64
MAPPED_BITS: Final = 96
UNKNOWN: Final = "unknown"
SUBSCRIBER_BITS: Final = 64
"""An IPv6 subscriber has at least a /64, and may change its address within it at will (RFC 6177)."""
NAT64: Final = IPv6Network("64:ff9b::/96")
"""IPv4 addresses behind a translator (RFC 6052), which would otherwise all be one subscriber."""


def parse_address(text: str) -> Address | None:
    """Parse an address and drop the name of its interface; None for text that is no address."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv4Address):
        return address
    return address.ipv4_mapped or IPv6Address(int(address))


def client_network(address: str | None) -> str:
    """Return the network that counts as one client: an IPv4 address, the /64 of an IPv6 address, or `UNKNOWN`."""
    parsed = None if address is None else parse_address(address)
    if isinstance(parsed, IPv6Address) and parsed in NAT64:
        parsed = IPv4Address(int(parsed) - int(NAT64.network_address))
    if isinstance(parsed, IPv6Address):
        return str(IPv6Network((parsed, SUBSCRIBER_BITS), strict=False))
    return UNKNOWN if parsed is None else str(parsed)


def parse_network(text: str) -> Network:
    """`10.0.0.0/8`, `2001:db8::/32`, or one address. Raises `ValueError` saying what is wrong."""
    _, slash, prefix = text.partition("/")
    if len(text) > MAX_LENGTH or (slash and not (prefix.isascii() and prefix.isdecimal())) or "%" in text:
        raise ValueError(f"{text[:MAX_LENGTH]!r} is no network like 10.0.0.0/8 or 2001:db8::/32")
    network = ip_network(text, strict=False)
    if ip_address(text.partition("/")[0]) != network.network_address:
        raise ValueError(f"{text} has bits set behind its prefix; the network is {network}")
    if isinstance(network, IPv6Network) and network.prefixlen >= MAPPED_BITS:
        mapped = network.network_address.ipv4_mapped
        return network if mapped is None else IPv4Network((mapped, network.prefixlen - MAPPED_BITS))
    return network


def check_networks(field: str, texts: Iterable[str]) -> list[str]:
    """The networks in their one spelling, without duplicates, in the given order. Raises `InvalidField` naming `field`."""
    networks: list[str] = []
    for text in texts:
        try:
            network = str(parse_network(text))
        except ValueError as error:
            raise InvalidField(field, f"{field}: {error}") from error
        if network not in networks:
            networks.append(network)
        if len(networks) > MAX_NETWORKS:
            raise InvalidField(field, f"{field} holds at most {MAX_NETWORKS} networks")
    return networks


def are_covered(narrow: Iterable[str], wide: Iterable[str]) -> bool:
    """Whether every address in a network of `narrow` is in a network of `wide`; several of these may cover one together."""
    four: list[IPv4Network] = []
    six: list[IPv6Network] = []
    for network in map(parse_network, wide):
        if isinstance(network, IPv4Network):
            four.append(network)
        else:
            six.append(network)
    joined4, joined6 = list(collapse_addresses(four)), list(collapse_addresses(six))
    return all(
        any(network.subnet_of(whole) for whole in joined4)
        if isinstance(network, IPv4Network)
        else any(network.subnet_of(whole) for whole in joined6)
        for network in map(parse_network, narrow)
    )


def is_within(address: Address | None, networks: Iterable[Network]) -> bool:
    """Whether one of `networks` contains `address`; an unknown address is in none."""
    return address is not None and any(address in network for network in networks)
