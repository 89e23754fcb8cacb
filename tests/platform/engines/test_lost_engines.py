"""Engines that die, restart or fall silent: open requests end, and the client connects again."""

import asyncio
import errno
import time

import pytest
import zmq
from tests.platform.engines.engine_socket import collect, connected, request, serving, started, until

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import FakeEngine, FakeScript, Fault
from loraplex.engine.messages import (
    AdapterRef,
    Failed,
    Finished,
    ProbeReport,
)
from loraplex.platform.engines import wire
from loraplex.platform.engines.event_buffer import EventBufferConfig
from loraplex.platform.engines.poison_memory import Work
from loraplex.platform.engines.remote_client import RemoteEngine
from loraplex.platform.engines.server import EngineServer


async def test_a_restarted_engine_fails_old_requests_and_takes_new_ones(address: str) -> None:
    first = FakeEngine(FakeScript(token_interval_s=0.01))
    server = EngineServer(first, address)
    await server.start()
    async with connected(address) as client:
        task = asyncio.create_task(collect(client, request(max_tokens=2000)))
        await until(lambda: first.running == 1)
        await server.close()
        async with serving(FakeEngine(), address):
            last = (await asyncio.wait_for(task, 60))[-1]
            assert isinstance(last, Failed) and last.code == "engine_lost"
            await asyncio.wait_for(client.wait_ready(), 60)
            assert isinstance((await collect(client, request("again")))[-1], Finished)


async def test_a_death_is_reported_with_the_requests_and_probes_that_were_open(address: str) -> None:
    deaths: list[list[Work]] = []
    async with started(
        RemoteEngine(address, EventBufferConfig(), on_death=lambda lost: deaths.append(list(lost)))
    ) as client:
        adapter = AdapterRef(namespace=bytes(32), digest="d" * 64, blob_path="/blobs/d")
        fake = FakeEngine(FakeScript(token_interval_s=0.01))

        async def never(adapter: AdapterRef) -> ProbeReport:
            await asyncio.Event().wait()
            raise AssertionError(adapter)

        async with serving(fake, address):
            await asyncio.wait_for(client.wait_ready(), 60)
            assert isinstance((await collect(client, request("ended")))[-1], Finished)
            await client.probe(adapter)
            fake.probe = never  # type: ignore[method-assign]
            probe = asyncio.create_task(client.probe(adapter))
            stream = client.submit(request("open", max_tokens=2000))
            await anext(stream)
            client.lose("it ended")
            assert [event async for event in stream][-1].code == "engine_lost"  # type: ignore[union-attr]
            with pytest.raises(EngineUnavailable):
                await probe
            assert not deaths
        async with serving(FakeEngine(), address):
            await asyncio.wait_for(client.wait_ready(), 60)
            assert (deaths, client.deaths) == ([[request("open", max_tokens=2000), adapter]], 1)
            assert isinstance((await collect(client, request("open")))[-1], Finished)


async def test_an_engine_that_was_only_silent_has_not_died_and_may_still_run_the_request(
    address: str,
) -> None:
    deaths: list[object] = []
    async with started(RemoteEngine(address, EventBufferConfig(), on_death=deaths.append)) as client:
        async with serving(FakeEngine(FakeScript(token_interval_s=0.01)), address):
            await asyncio.wait_for(client.wait_ready(), 60)
            stream = client.submit(request("open", max_tokens=2000))
            await anext(stream)
            client.lose("it was silent")
            assert [event async for event in stream][-1].code == "engine_lost"  # type: ignore[union-attr]
            await asyncio.wait_for(client.wait_ready(), 60)
            (refused,) = await collect(client, request("open"))
            assert isinstance(refused, Failed) and refused.code == "engine_unavailable"
            assert isinstance((await collect(client, request("other")))[-1], Finished)
        assert (deaths, client.deaths) == ([], 0)


async def test_requests_of_a_failed_engine_stay_open_until_its_process_ends(address: str) -> None:
    """Then they count as open at its death, and are submitted once more."""
    fake = FakeEngine(FakeScript(faults=(Fault(kind="fail", code="engine_lost"),)))
    async with serving(fake, address) as server, connected(address) as client:
        task = asyncio.create_task(collect(client, request()))
        await asyncio.wait_for(server.broken.wait(), 60)
        await client.stats()
        assert not task.done()
        client.lose("it ended")
        assert (await task)[-1].code == "engine_lost"  # type: ignore[union-attr]


async def test_a_gateway_whose_loop_stood_still_loses_no_engine(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PEER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(wire, "PING_INTERVAL_S", 0.1)
    client = RemoteEngine(address, EventBufferConfig(), silence_s=0.5)
    async with started(client), serving(FakeEngine(FakeScript(token_interval_s=0.05)), address):
        await asyncio.wait_for(client.wait_ready(), 60)
        task = asyncio.create_task(collect(client, request(max_tokens=20)))
        await asyncio.sleep(0.2)
        time.sleep(1.5)  # noqa: ASYNC251 - neither side's loop runs
        last = (await asyncio.wait_for(task, 60))[-1]
        assert isinstance(last, Finished) and last.reason == "length"


async def test_without_an_engine_requests_fail_at_once(address: str) -> None:
    async with started(RemoteEngine(address, EventBufferConfig())) as client:
        (event,) = await collect(client, request())
        assert isinstance(event, Failed) and event.code == "engine_unavailable"
        with pytest.raises(EngineUnavailable):
            client.info()
        with pytest.raises(EngineUnavailable):
            await client.stats()
        await asyncio.wait_for(client.abort("r"), 60)


@pytest.mark.parametrize("error", [zmq.ZMQError(errno.EMFILE), OSError(errno.ENOMEM, "no memory")])
async def test_a_process_without_files_or_memory_reconnects_once_it_has_some(
    address: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(wire, "PING_INTERVAL_S", 0.05)
    client = RemoteEngine(address, EventBufferConfig())
    open_socket, errors = client._context.socket, [error, error]

    def fail_first(kind: int) -> zmq.Socket[bytes]:
        if errors:
            raise errors.pop()
        return open_socket(kind)

    monkeypatch.setattr(client._context, "socket", fail_first)
    async with started(client), serving(FakeEngine(), address):
        async with asyncio.timeout(60):
            await client.wait_ready()
        assert not errors
        assert isinstance((await collect(client, request()))[-1], Finished)
