"""The Valkey client answers, or fails at once."""

import time
from pathlib import Path
from uuid import UUID

import pytest

from loraplex.tenants.errors import InvalidField, ValkeyUnavailable
from loraplex.tenants.valkey import open_valkey, ping, tenant_key


async def test_ping(valkey_url: str) -> None:
    client = open_valkey(valkey_url)
    await ping(client)
    await client.aclose()


async def test_a_server_that_is_down_fails_at_once(tmp_path: Path) -> None:
    client = open_valkey(f"unix://{tmp_path}/none.sock")
    begun = time.monotonic()
    with pytest.raises(ValkeyUnavailable):
        await ping(client)
    assert time.monotonic() - begun < 1.0


async def test_a_wrong_password_is_no_answer(valkey_url: str) -> None:
    client = open_valkey("unix://:wrong" + valkey_url[valkey_url.index("@") :])
    with pytest.raises(ValkeyUnavailable):
        await ping(client)
    await client.aclose()


@pytest.mark.parametrize("url", ["valkey+unix:///x", "http://host", "", "/path"])
def test_refused_addresses(url: str) -> None:
    with pytest.raises(InvalidField, match="REDIS_URL"):
        open_valkey(url)


def test_keys_of_a_tenant_share_a_slot() -> None:
    assert (
        tenant_key(UUID(int=1), "quota", "rpm") == "loraplex:{00000000-0000-0000-0000-000000000001}:quota:rpm"
    )
