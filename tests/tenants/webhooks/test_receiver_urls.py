"""Which URLs are refused, and that no special-purpose address counts as public."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.api_keys.networks import Address
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.webhooks.receiver_urls import MAX_URL_LENGTH, ReceiverUrl, is_public, parse_receiver_url

PRIVATE = (
    *(
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "127.255.255.255",
        "169.254.169.254",
    ),
    *("172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1"),
    *("198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::808:808", "64:ff9b:1::1"),
    *("100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "3fff::1", "5f00::1", "fc00::1", "fd12::1"),
    *("fe80::1", "fec0::1", "ff02::1"),
)
PUBLIC = (
    *(
        "8.8.8.8",
        "172.15.255.255",
        "172.32.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "192.0.1.0",
        "223.255.255.255",
    ),
    *("2606:4700::1111", "2a00:1450::8a", "2001:4860:4860::8888", "2003::1"),
)
WRONG = (
    *("", "https://", "example.com", "ftp://example.com", "https:///x", "https://user@example.com/x"),
    *("https://user:password@example.com/", "https://example.com/#part", "https://example.com\\@10.0.0.1/"),
    *("https://exa mple.com/", "https://example.com/\n", "https://bücher.example/", "https://example.com:0/"),
    *("https://example.com:65536/", "https://example.com:22/", "https://example.com:80/", "https://[::g]/"),
    *(
        "https://[1.2.3]/",
        "https://[::1%25eth0]/",
        "HTTPS://example.com/",
        "https://example.com?x=1",
        "https://.example.com/",
    ),
    "https://example.com/" + "a" * MAX_URL_LENGTH,
)


@pytest.mark.parametrize("text", PRIVATE)
def test_a_special_address_is_not_public(text: str) -> None:
    assert not is_public(ip_address(text))
    host = f"[{text}]" if ":" in text else text
    with pytest.raises(InvalidField, match="private or reserved") as refused:
        parse_receiver_url(f"https://{host}/", allow_private=False)
    assert refused.value.field == "url"
    assert parse_receiver_url(f"http://{host}:8080/", allow_private=True).host == text


@pytest.mark.parametrize(
    "host",
    [
        *(
            "2130706433",
            "017700000001",
            "0177.0.0.1",
            "0x7f000001",
            "0x7f.1",
            "127.1",
            "0",
            "2852039166",
            "10.1",
        ),
        *("localhost", "LOCALHOST", "localhost.", "a.localhost", "ip6-localhost", "metadata", "postgres."),
    ],
)
def test_what_a_delivery_would_refuse_is_refused_at_once(host: str) -> None:
    with pytest.raises(InvalidField, match="private or reserved"):
        parse_receiver_url(f"https://{host}/hooks", allow_private=False)
    assert parse_receiver_url(f"https://{host}/hooks", allow_private=True).host == host


@pytest.mark.parametrize("text", PUBLIC)
def test_other_addresses_are_public(text: str) -> None:
    assert is_public(ip_address(text))


@given(st.ip_addresses())
def test_what_the_standard_library_calls_local_is_never_public(address: Address) -> None:
    special = (address.is_private, address.is_loopback, address.is_link_local, address.is_multicast)
    assert not (is_public(address) and any((*special, address.is_reserved, address.is_unspecified)))


@pytest.mark.parametrize("url", WRONG)
def test_what_is_no_url_of_a_receiver_is_refused(url: str) -> None:
    for allow_private in (False, True):
        with pytest.raises(InvalidField):
            parse_receiver_url(url, allow_private=allow_private)


def test_http_is_for_private_networks() -> None:
    with pytest.raises(InvalidField, match="must begin with https"):
        parse_receiver_url("http://example.com/", allow_private=False)
    assert parse_receiver_url("http://example.com", allow_private=True) == ReceiverUrl(
        "http", "example.com", 80, "/"
    )


def test_the_parts_of_a_url() -> None:
    parsed = parse_receiver_url("https://hooks.example.com:8443/a%20b?x=1&y=%2F", allow_private=False)
    assert parsed == ReceiverUrl("https", "hooks.example.com", 8443, "/a%20b?x=1&y=%2F")
    assert parsed.authority == "hooks.example.com:8443"
    assert (
        parse_receiver_url("https://[2606:4700::1111]/", allow_private=False).authority == "[2606:4700::1111]"
    )
