"""A drain of an engine's process: its gateways see it, open requests end or go on elsewhere, and nothing counts as a death."""

import asyncio
from pathlib import Path

import pytest
from tests.platform.engines.engine_socket import collect, connected, request, serving, started, until
from tests.platform.engines.test_process import options

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.engine.messages import Delta, Failed, Finished
from loraplex.platform.engines import wire
from loraplex.platform.engines.process import EngineProcess
from loraplex.platform.engines.remote_client import RemoteEngine

SLOW = FakeScript(token_interval_s=0.01)


def code(event: object) -> str | None:
    return event.code if isinstance(event, Failed) else None


async def test_every_gateway_sees_a_drain_and_open_requests_end_within_the_grace(address: str) -> None:
    async with (
        serving(FakeEngine(SLOW), address) as server,
        connected(address) as first,
        connected(address) as second,
    ):
        short = asyncio.create_task(collect(first, request("short", max_tokens=20)))
        long = second.submit(request("long", max_tokens=4000))
        await anext(long)
        second.request_drain(600.0)
        await server.draining.wait()
        draining = asyncio.create_task(server.drain())
        await until(lambda: all(each.last_stats and each.last_stats.draining for each in (first, second)))
        assert [code(event) for event in await collect(first, request("new"))] == ["engine_draining"]
        assert isinstance((await short)[-1], Finished)
        assert server.was_asked and not draining.done()
        # A further wish, or SIGTERM, shortens the grace.
        server.begin_drain(0.05)
        await asyncio.wait_for(draining, 60)
        events = [event async for event in long]
        assert code(events[-1]) == "engine_draining"
        assert all(isinstance(event, Delta) for event in events[:-1])


async def test_an_engine_that_ends_after_a_drain_is_no_death(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[object] = []
    async with started(RemoteEngine(address, on_death=deaths.append)) as client:
        async with serving(FakeEngine(SLOW), address) as server:
            await asyncio.wait_for(client.wait_ready(), 60)
            server.begin_drain(0.0)
            await server.drain()
        # Its farewell is read at once: no gateway waits for silence to show.
        await until(lambda: not client.connected, 60)
        assert client.silent_for() < wire.PEER_TIMEOUT_S
        async with serving(FakeEngine(SLOW), address):
            await asyncio.wait_for(client.wait_ready(), 60)
            assert isinstance((await collect(client, request("next")))[-1], Finished)
    assert (deaths, client.deaths) == ([], 0)
    with pytest.raises(EngineUnavailable):
        client.request_drain(1.0)


async def test_what_an_engine_had_not_read_when_it_ended_goes_on_elsewhere(address: str) -> None:
    async with serving(FakeEngine(SLOW), address) as server, connected(address) as client:
        stream = client.submit(request("open", max_tokens=4000))
        await anext(stream)
        client._handle(wire.Goodbye("it was drained", drained=True))
        assert code([event async for event in stream][-1]) == "engine_draining"
        assert not client._lost and server.malformed == 0


async def test_a_drained_child_ends_with_status_0_and_is_not_started_again(tmp_path: Path) -> None:
    engine = EngineProcess(options(tmp_path, SLOW))
    await engine.start()
    try:
        running = asyncio.create_task(collect(engine.client, request("r", max_tokens=50)))
        await until(lambda: engine.client.open_requests == 1)
        process = engine._process
        engine.drain(600.0)
        await asyncio.wait_for(engine.drained.wait(), 60)
        assert isinstance((await running)[-1], Finished)
        assert process is not None and process.returncode == 0
        assert (engine.pid, engine.client.restarts, engine.client.deaths) == (None, 0, 0)
    finally:
        await engine.stop()


async def test_a_child_that_another_gateway_drains_is_not_started_again(tmp_path: Path) -> None:
    engine = EngineProcess(options(tmp_path, SLOW))
    await engine.start()
    try:
        async with connected(engine.client.address) as other:
            other.request_drain(0.0)
            await asyncio.wait_for(engine.drained.wait(), 60)
    finally:
        await engine.stop()


async def test_a_child_that_dies_while_it_drains_is_not_started_again(tmp_path: Path) -> None:
    engine = EngineProcess(options(tmp_path, SLOW))
    await engine.start()
    try:
        stream = engine.client.submit(request("r", max_tokens=4000))
        await anext(stream)
        engine.drain(600.0)
        assert engine._process is not None
        engine._process.kill()
        await asyncio.wait_for(engine.drained.wait(), 60)
        assert code([event async for event in stream][-1]) == "engine_lost"
    finally:
        await engine.stop()
