"""The Valkey client gets a reply or fails at once."""

import time
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from loraplex.tenants.errors import InvalidField, ValkeyUnavailable
from loraplex.tenants.valkey import erase_tenant, forget_all_tenants, open_valkey, ping, tenant_key


async def test_ping(valkey_url: str) -> None:
    client = open_valkey(valkey_url)
    await ping(client)
    await client.aclose()


async def test_a_server_that_is_down_fails_at_once(tmp_path: Path) -> None:
    client = open_valkey(f"unix://{tmp_path}/none.sock")
    begun = time.monotonic()
    with pytest.raises(ValkeyUnavailable):
        await ping(client)
    assert time.monotonic() - begun < 10


async def test_a_wrong_password_is_unavailable(valkey_url: str) -> None:
    client = open_valkey("unix://:wrong" + valkey_url[valkey_url.index("@") :])
    with pytest.raises(ValkeyUnavailable):
        await ping(client)
    await client.aclose()


@pytest.mark.parametrize("url", ["valkey+unix:///x", "http://host", "", "/path"])
def test_refused_addresses(url: str) -> None:
    with pytest.raises(InvalidField, match="REDIS_URL"):
        open_valkey(url)


def test_a_cluster_is_refused_by_name() -> None:
    with pytest.raises(InvalidField, match="REDIS_URL names a cluster.*allowed: redis, rediss, unix"):
        open_valkey("redis+cluster://127.0.0.1:6379")


def test_keys_of_a_tenant_share_a_slot() -> None:
    assert (
        tenant_key(UUID(int=1), "quota", "rpm") == "loraplex:{00000000-0000-0000-0000-000000000001}:quota:rpm"
    )


async def test_all_keys_of_a_tenant_are_erased_and_no_others(valkey_url: str) -> None:
    client, mine, other = open_valkey(valkey_url), uuid4(), uuid4()
    for number in range(1203):
        await client.set(tenant_key(mine, "k", str(number)), b"x")
    await client.hset(tenant_key(other, "h"), "f", "x")
    assert await erase_tenant(client, mine) == 1203
    assert await erase_tenant(client, mine) == 0
    assert [name async for name in client.scan_iter()] == [tenant_key(other, "h").encode()]
    await client.aclose()
    closed = open_valkey("unix:///nowhere/none.sock")
    with pytest.raises(ValkeyUnavailable):
        await erase_tenant(closed, mine)


async def test_all_tenants_are_forgotten_and_nothing_of_other_programs(valkey_url: str) -> None:
    client, tenants = open_valkey(valkey_url), [uuid4() for _ in range(3)]
    for tenant in tenants:
        for name in ("state", "1:open", "denials"):
            await client.set(tenant_key(tenant, name), b"x")
    others = {b"loraplex", b"loraplex:drill", b"other:{1}:state"}
    for other in others:
        await client.set(other, b"x")
    assert await forget_all_tenants(client) == 3
    assert {name async for name in client.scan_iter()} == others
    assert await forget_all_tenants(client) == 0
    await client.aclose()
    closed = open_valkey("unix:///nowhere/none.sock")
    with pytest.raises(ValkeyUnavailable):
        await forget_all_tenants(closed)
