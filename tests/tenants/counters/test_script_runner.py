"""Running scripts: unknown to the server, on a server that hangs, and on one that is gone."""

import asyncio
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis
from tests.tenants.counters.counting import EMPTY, Customer, admit, deny, used

from loraplex.tenants.counters.counter_replies import CountersMissing
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import ValkeyUnavailable
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.valkey import COMMAND_SECONDS, open_valkey


async def test_scripts_are_sent_again_to_a_server_that_forgot_them(client: Redis, counters: Counters) -> None:
    customer = Customer(tenant=QuotaLimits(concurrent_requests=1))
    await client.script_flush()
    assert await counters.admit(customer.request()) == CountersMissing()
    await client.script_flush()
    await counters.seed(customer.tenant_id, 1, EMPTY)
    await client.script_flush()
    request = customer.request()
    await admit(counters, request)
    await client.script_flush()
    assert (await admit(counters, request)).repeated
    await deny(counters, customer.request())
    await client.script_flush()
    await counters.release(customer.tenant_id, request.id)
    await client.script_flush()
    assert (await used(counters, customer))["tenant", "concurrent_requests"].used == 0


async def test_more_requests_than_connections_wait_their_turn(counters: Counters) -> None:
    customer = Customer()
    answers = await asyncio.gather(*(counters.admit(customer.request()) for _ in range(300)))
    assert answers == [CountersMissing()] * 300


async def test_a_server_that_hangs_costs_the_deadline(tmp_path: Path) -> None:
    """As one that was stopped: connections are open, nothing answers."""

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(never_answer, tmp_path / "hangs.sock")
    client = open_valkey(f"unix://{tmp_path}/hangs.sock")
    begun = time.monotonic()
    with pytest.raises(ValkeyUnavailable):
        await Counters(client).admit(Customer().request())
    assert COMMAND_SECONDS * 0.9 <= time.monotonic() - begun < COMMAND_SECONDS + 0.5
    await client.aclose()
    server.close()
    await server.wait_closed()


async def test_a_server_that_is_gone_fails_at_once(tmp_path: Path) -> None:
    client = open_valkey(f"unix://{tmp_path}/none.sock")
    begun = time.monotonic()
    with pytest.raises(ValkeyUnavailable):
        await Counters(client).admit(Customer().request())
    assert time.monotonic() - begun < 0.5


async def test_a_server_that_refuses_is_unavailable(client: Redis, counters: Counters) -> None:
    await client.config_set("maxmemory", "1")
    try:
        with pytest.raises(ValkeyUnavailable):
            await counters.seed(Customer().tenant_id, 1, EMPTY)
    finally:
        await client.config_set("maxmemory", "0")
