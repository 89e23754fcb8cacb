"""Counters on a real Valkey, with long timeouts: these tests do not test them, and machines are busy."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.valkey import open_valkey


@pytest.fixture
async def client(valkey_url: str) -> AsyncIterator[Redis]:
    client = open_valkey(valkey_url, command_s=10.0)
    assert isinstance(client, Redis)
    yield client
    await client.aclose()


@pytest.fixture
def counters(client: Redis) -> Counters:
    return Counters(client, command_s=10.0, bulk_s=10.0)
