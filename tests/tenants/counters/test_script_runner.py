"""Running scripts: unknown to the server, on a server that hangs, and on one that is gone."""

import asyncio
import time
from pathlib import Path

import hiredis
import pytest
from redis.asyncio import Redis
from tests.tenants.counters.limited_tenant import EMPTY, LimitedTenant, admit, deny, used

from loraplex.tenants.admission.reserve import PERIODIC_WAIT_SECONDS
from loraplex.tenants.counters.counter_replies import CountersMissing
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.counters.pipelined_commands import BUSY_SECONDS, CLOSE_SECONDS
from loraplex.tenants.counters.script_runner import ScriptRunner, load_script
from loraplex.tenants.errors import ValkeyUnavailable
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.valkey import ANSWER_SECONDS, COMMAND_SECONDS, CONNECT_SECONDS, open_valkey


async def test_the_server_is_the_one_that_the_test_names(client: Redis, counter_server: str) -> None:
    facts = await client.info("server")
    assert ("valkey_version" in facts) == (counter_server == "valkey")


async def test_scripts_are_sent_again_to_a_server_that_forgot_them(client: Redis, counters: Counters) -> None:
    tenant = LimitedTenant(tenant=QuotaLimits(concurrent_requests=1))
    await client.script_flush()
    assert await counters.reserve(tenant.request()) == CountersMissing()
    await client.script_flush()
    await counters.rebuild(tenant.tenant_id, 1, EMPTY)
    await client.script_flush()
    request = tenant.request()
    await admit(counters, request)
    await client.script_flush()
    assert (await admit(counters, request)).repeated
    await deny(counters, tenant.request())
    await client.script_flush()
    await counters.cancel(tenant.tenant_id, request.id)
    await client.script_flush()
    assert (await used(counters, tenant))["tenant", "concurrent_requests"].used == 0


async def test_more_requests_than_connections_wait_their_turn(counters: Counters) -> None:
    tenant = LimitedTenant()
    replies = await asyncio.gather(*(counters.reserve(tenant.request()) for _ in range(300)))
    assert replies == [CountersMissing()] * 300


async def test_calls_side_by_side_need_one_exchange(tmp_path: Path) -> None:
    """The server replies to all 300 at once, when it has them: on a busy event loop an exchange takes tens of milliseconds."""
    count = 300

    async def answer_together(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received, scripts = hiredis.Reader(), 0
        while data := await reader.read(1 << 16):
            received.feed(data)
            while command := received.gets():
                scripts += command[0] == b"EVALSHA"
                writer.write((b"" if scripts < count else b":1\r\n" * count) if scripts else b"+OK\r\n")
        writer.close()

    server = await asyncio.start_unix_server(answer_together, tmp_path / "together.sock")
    client = open_valkey(f"unix://{tmp_path}/together.sock?protocol=2", command_s=60)
    runner, script = ScriptRunner(client, 60), load_script("read")
    assert await asyncio.gather(*(runner.run(script, "key", ()) for _ in range(count))) == [1] * count
    await client.aclose()
    server.close()
    await server.wait_closed()


async def test_each_of_many_bulk_calls_is_answered_in_its_time(tmp_path: Path) -> None:
    """As the leases of a full gateway: all of them take longer than one may."""

    async def answer_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = hiredis.Reader()
        while data := await reader.read(1 << 16):
            received.feed(data)
            while command := received.gets():
                if command[0] == b"EVALSHA":
                    await asyncio.sleep(0.005)
                writer.write(b"*0\r\n" if command[0] == b"EVALSHA" else b"+OK\r\n")
        writer.close()

    server = await asyncio.start_unix_server(answer_slowly, tmp_path / "slow.sock")
    client = open_valkey(f"unix://{tmp_path}/slow.sock?protocol=2", command_s=60)
    counters = Counters(client)
    calls = [counters.expired(LimitedTenant().tenant_id) for _ in range(300)]
    assert 0.005 * len(calls) > max(ANSWER_SECONDS, BUSY_SECONDS)
    assert await asyncio.gather(*calls) == [[]] * len(calls)
    await client.aclose()
    server.close()
    await server.wait_closed()


async def test_a_server_that_hangs_costs_the_deadline(tmp_path: Path) -> None:
    """As a stopped server: connections are open, nothing replies."""

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(never_answer, tmp_path / "hangs.sock")
    client = open_valkey(f"unix://{tmp_path}/hangs.sock")
    begun = time.monotonic()
    with pytest.raises(ValkeyUnavailable):
        await Counters(client).reserve(LimitedTenant().request())
    assert COMMAND_SECONDS * 0.9 <= time.monotonic() - begun < 30
    await client.aclose()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("opens", [True, False], ids=["an open connection", "a connection that opens"])
async def test_a_long_wait_outlives_connections_that_short_ones_gave_up(tmp_path: Path, opens: bool) -> None:
    """As a server that gets no processor time for a while. `opens`: only calls wait for it, and no handshake."""
    runs = asyncio.Event()

    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = hiredis.Reader()
        while data := await reader.read(1 << 16):
            received.feed(data)
            while command := received.gets():
                is_call = command[0] == b"EVALSHA"
                if is_call or not opens:
                    await runs.wait()
                writer.write(b"*1\r\n$8\r\nunseeded\r\n" if is_call else b"+OK\r\n")
        writer.close()

    server = await asyncio.start_unix_server(answer_late, tmp_path / "late.sock")
    client = open_valkey(f"unix://{tmp_path}/late.sock?protocol=2")
    counters, tenant = Counters(client), LimitedTenant()
    with pytest.raises(ValkeyUnavailable):
        await counters.reserve(tenant.request())
    long = asyncio.create_task(counters.reserve(tenant.request(), PERIODIC_WAIT_SECONDS))
    for _ in range(3):
        with pytest.raises(ValkeyUnavailable):
            await counters.reserve(tenant.request())
    assert not long.done()
    runs.set()
    assert await long == CountersMissing()
    # Else a connection's opening, or its end for others, would end the wait first.
    assert PERIODIC_WAIT_SECONDS < min(ANSWER_SECONDS, CONNECT_SECONDS, CLOSE_SECONDS)
    await client.aclose()
    server.close()
    await server.wait_closed()


async def test_a_server_that_is_gone_fails_at_once(tmp_path: Path) -> None:
    client = open_valkey(f"unix://{tmp_path}/none.sock")
    begun = time.monotonic()
    with pytest.raises(ValkeyUnavailable):
        await Counters(client).reserve(LimitedTenant().request())
    assert time.monotonic() - begun < 5


async def test_a_server_that_refuses_is_unavailable(client: Redis, counters: Counters) -> None:
    await client.config_set("maxmemory", "1")
    try:
        with pytest.raises(ValkeyUnavailable):
            await counters.rebuild(LimitedTenant().tenant_id, 1, EMPTY)
    finally:
        await client.config_set("maxmemory", "0")
