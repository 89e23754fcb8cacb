"""Client and server of the engine socket over a real unix socket, with the scripted engine behind it."""

import asyncio
import os
import pickle  # noqa: TID251  # as an attack
import stat
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from msgspec.structs import replace
from structlog.testing import capture_logs
from tests.platform.engines.engine_socket import collect, connected, request, serving, until

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import DEFAULT_INFO, FakeEngine, FakeScript, Fault
from loraplex.engine.messages import (
    AdapterRef,
    Delta,
    EngineStats,
    Event,
    Failed,
    Finished,
    ProbeReport,
    Started,
    Usage,
)
from loraplex.platform.engines import remote_client, wire
from loraplex.platform.engines.event_buffer import EventBufferConfig
from loraplex.platform.engines.remote_client import RemoteEngine
from loraplex.platform.engines.server import EngineServer
from loraplex.platform.startup_errors import SettingsError


async def test_a_request_over_the_socket_equals_one_in_process(address: str) -> None:
    local = [event async for event in FakeEngine().submit(request(n=2))]
    async with serving(FakeEngine(), address), connected(address) as client:
        remote = await collect(client, request(n=2))
        assert client.info() == FakeEngine().info()
    assert remote[0] == local[0] and isinstance(remote[0], Started)

    def text(events: list[Event], choice: int) -> str:
        return "".join(e.text for e in events if isinstance(e, Delta) and e.choice == choice)

    for choice in range(2):
        assert text(remote, choice) == text(local, choice)
    assert [e for e in remote if isinstance(e, Finished)] == [e for e in local if isinstance(e, Finished)]


async def test_the_socket_is_private(address: str) -> None:
    async with serving(FakeEngine(), address):
        path = wire.socket_path(address)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()


async def test_an_open_folder_or_a_long_path_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(SettingsError, match="0700"):
        await EngineServer(FakeEngine(), f"ipc://{tmp_path}/e.sock").start()
    with pytest.raises(SettingsError, match="at most"):
        RemoteEngine("ipc:///" + "x" * 200, EventBufferConfig())
    with pytest.raises(SettingsError, match="ipc://"):
        EngineServer(FakeEngine(), "tcp://0.0.0.0:5555")


async def test_closing_a_stream_aborts_and_is_acknowledged(address: str) -> None:
    fake = FakeEngine(FakeScript(token_interval_s=0.01))
    async with serving(fake, address), connected(address) as client:
        stream = client.submit(request(max_tokens=1000))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: fake.running == 0)
        assert fake.aborts == 1
        await asyncio.wait_for(client.abort("r"), 60)
        await asyncio.wait_for(client.abort("never seen"), 60)


async def test_abort_reaches_a_request_that_stalls(address: str) -> None:
    fake = FakeEngine(FakeScript(faults=(Fault(kind="stall", after_tokens=1),)))
    async with serving(fake, address), connected(address) as client:
        task = asyncio.create_task(collect(client, request()))
        await until(lambda: fake.running == 1)
        await asyncio.wait_for(client.abort("r"), 60)
        last = (await task)[-1]
        assert isinstance(last, Finished) and last.reason == "abort"


async def test_a_forgotten_tenant_ends_at_every_gateway(address: str) -> None:
    fake = FakeEngine(FakeScript(token_interval_s=0.01))
    async with serving(fake, address), connected(address) as one, connected(address) as two:
        task = asyncio.create_task(collect(one, request(max_tokens=2000)))
        await until(lambda: fake.running == 1)
        await asyncio.wait_for(two.forget(b"n" * 32), 60)
        last = (await asyncio.wait_for(task, 60))[-1]
        assert isinstance(last, Failed) and last.code == "namespace_forgotten"
        await two.forget(b"n" * 32)
        assert fake.forgotten == [b"n" * 32] * 2


async def test_forgetting_is_repeated_and_fails_with_the_engine(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeEngine()
    async with serving(fake, address), connected(address) as client:
        send = client._send
        lost: list[wire.ToEngine] = []

        def lossy(message: wire.ToEngine) -> bool:
            if isinstance(message, wire.Forget) and not lost:
                lost.append(message)
                return False
            return send(message)

        monkeypatch.setattr(client, "_send", lossy)
        await asyncio.wait_for(client.forget(b"n" * 32), 60)
        assert lost and fake.forgotten
        monkeypatch.setattr(client, "_send", lambda message: False)
        waiting = asyncio.ensure_future(client.forget(b"m" * 32))
        await asyncio.sleep(0)
        client.lose("it ended")
        with pytest.raises(EngineUnavailable):
            await waiting
        with pytest.raises(EngineUnavailable):
            await client.forget(b"m" * 32)


async def test_aborts_are_repeated_until_acknowledged(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine(FakeScript(token_interval_s=0.01))
    async with serving(fake, address), connected(address) as client:
        stream = client.submit(request(max_tokens=100_000 // 50))
        await anext(stream)
        send = client._send
        lost: list[wire.ToEngine] = []

        def lossy(message: wire.ToEngine) -> bool:
            if isinstance(message, wire.Abort) and not lost:
                lost.append(message)
                return False
            return send(message)

        monkeypatch.setattr(client, "_send", lossy)
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: fake.running == 0)
        assert lost and fake.aborts == 1


async def test_a_silent_gateway_loses_its_rows_and_other_gateways_keep_theirs(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PEER_TIMEOUT_S", 0.6)
    monkeypatch.setattr(wire, "PING_INTERVAL_S", 0.1)
    fake = FakeEngine(FakeScript(token_interval_s=0.01))
    async with serving(fake, address), connected(address) as alive, connected(address) as dead:
        keep = asyncio.create_task(collect(alive, request("keep", max_tokens=150)))
        lost = asyncio.create_task(collect(dead, request("lost", max_tokens=2000)))
        await until(lambda: fake.running == 2)
        monkeypatch.setattr(dead, "_send", lambda message: False)
        await until(lambda: fake.running == 1)
        assert fake.aborts == 1
        assert isinstance((await keep)[-1], Finished)
        lost.cancel()


async def test_one_gateway_cannot_abort_anothers_request_nor_reuse_its_id(address: str) -> None:
    fake = FakeEngine(FakeScript(token_interval_s=0.005))
    async with serving(fake, address), connected(address) as one, connected(address) as other:
        task = asyncio.create_task(collect(one, request(max_tokens=60)))
        await until(lambda: fake.running == 1)
        await asyncio.wait_for(other.abort("r"), 60)
        (refused,) = await collect(other, request())
        assert isinstance(refused, Failed) and refused.code == "invalid_request"
        last = (await task)[-1]
        assert isinstance(last, Finished) and last.reason == "length"


async def test_stats_travel(address: str) -> None:
    async with serving(FakeEngine(), address), connected(address) as client:
        await collect(client, request())
        assert (await client.stats()).generation_tokens == 8


async def test_a_cancellation_beside_the_reply_is_not_swallowed(address: str) -> None:
    """`asyncio.wait_for` of Python 3.11 returns the reply in place of it."""
    async with serving(FakeEngine(), address), connected(address) as client:
        asking = asyncio.create_task(client.stats())
        await asyncio.sleep(0)
        reply = client._pongs[client._number]
        reply.set_result(EngineStats())
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_request_waits_for_an_engine_that_was_lost_a_moment_ago(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that was paused is unknown to its engine, and requests that queued up meanwhile come before its next `Hello`."""
    async with serving(FakeEngine(), address), connected(address) as client:
        client.lose("the gateway was paused")
        assert isinstance((await collect(client, request()))[-1], Finished)
    monkeypatch.setattr(remote_client, "RECONNECT_S", 0.1)
    async with serving(FakeEngine(), address) as server, connected(address) as client:
        await server.close()
        client.lose("the engine has ended")
        (refused,) = await collect(client, request())
        assert isinstance(refused, Failed) and refused.code == "engine_unavailable"


async def test_an_engine_that_comes_back_with_other_files_is_told(address: str) -> None:
    changed = FakeEngine(FakeScript(info=replace(DEFAULT_INFO, system_fingerprint="fp_0")))
    async with serving(FakeEngine(), address) as server, connected(address) as client:
        await server.close()
        client.lose("the engine has ended")
        with capture_logs() as logs:
            async with serving(changed, address):
                await asyncio.wait_for(client.wait_ready(), 60)
        (told,) = [each for each in logs if "fingerprint" in each["event"]]
        assert (told["before"], told["now"]) == ("fp_fa4efa4efa4efa4e", "fp_0")
        assert client.info().system_fingerprint == "fp_0"


async def test_a_probe_travels_and_is_lost_with_its_engine(address: str) -> None:
    adapter = AdapterRef(namespace=bytes(32), digest="d" * 64, blob_path="/blobs/d")
    fake = FakeEngine(FakeScript(probe=ProbeReport(digest="", max_error={"q_proj": 0.25}, bound=0.5)))
    async with serving(fake, address) as server, connected(address) as client:
        report = await client.probe(adapter)
        assert (report.digest, report.max_error, report.code) == ("d" * 64, {"q_proj": 0.25}, None)
        assert fake.probed == [adapter]
        hangs = asyncio.Event()

        async def never(adapter: AdapterRef) -> ProbeReport:
            await hangs.wait()
            return report

        fake.probe = never  # type: ignore[method-assign]
        probe = asyncio.create_task(client.probe(adapter))
        await asyncio.sleep(0.05)
        client.lose("the test says so")
        with pytest.raises(EngineUnavailable, match="the test says so"):
            await asyncio.wait_for(probe, 60)
        with pytest.raises(EngineUnavailable, match="not connected"):
            await client.probe(adapter)
        await asyncio.wait_for(client.wait_ready(), 60)
        await fake.drain()
        del fake.probe
        with pytest.raises(EngineUnavailable, match="draining"):
            await client.probe(adapter)
        assert server.malformed == 0
        hangs.set()


async def test_the_last_events_of_a_drain_arrive(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the gateway's queue was full when the last request ended."""
    engine, send, is_full = FakeEngine(), EngineServer._send, True

    def send_unless_full(server: EngineServer, identity: bytes, message: wire.ToGateway) -> bool:
        return not (is_full and isinstance(message, wire.Events)) and send(server, identity, message)

    monkeypatch.setattr(EngineServer, "_send", send_unless_full)
    server = EngineServer(engine, address)
    await server.start()
    async with connected(address) as client:
        stream = asyncio.create_task(collect(client, request()))
        await until(lambda: bool(engine.requests))
        await engine.drain()
        closing = asyncio.create_task(server.close())
        await asyncio.sleep(0)
        is_full = False
        async with asyncio.timeout(60):
            assert isinstance((await stream)[-1], Finished)
            await closing


async def test_malformed_bytes_do_not_affect_other_peers(address: str) -> None:
    async with serving(FakeEngine(), address) as server, connected(address) as client:
        context = zmq.asyncio.Context()
        raw = context.socket(zmq.DEALER)
        raw.connect(address)
        junk = [
            b"",
            b"\xc1",
            pickle.dumps({"a": 1}),
            os.urandom(500),
            wire.encode(wire.Hello(1))[:-1],
            b"\x81\xa4type",
        ]
        for data in junk:
            await raw.send(data)
        await raw.send_multipart([b"a", b"b", b"c"])
        await until(lambda: server.malformed == len(junk) + 1)
        await raw.send(wire.encode(wire.Ping(1)))
        assert isinstance(wire.decode_to_gateway(await raw.recv()), wire.Goodbye)
        await raw.send(wire.encode(wire.Hello(99)))
        assert isinstance(wire.decode_to_gateway(await raw.recv()), wire.Goodbye)
        raw.close(0)
        context.term()
        assert isinstance((await collect(client, request()))[-1], Finished)


async def test_a_slow_reader_is_aborted_alone(address: str) -> None:
    fake = FakeEngine(FakeScript(token_interval_s=0.001))
    async with serving(fake, address), connected(address, EventBufferConfig(tokens=100)) as client:
        slow = client.submit(request("slow", max_tokens=3000))
        await anext(slow)
        quick = asyncio.create_task(collect(client, request("quick", max_tokens=300)))
        await until(lambda: fake.aborts == 1)
        rest = [event async for event in slow]
        assert isinstance(rest[-1], Failed) and rest[-1].code == "timeout"
        assert rest[-1].usage[0].completion_tokens > 100
        assert len(rest) <= 3
        assert isinstance((await quick)[-1], Finished)


async def test_a_tick_of_many_rows_is_few_messages(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine(FakeScript(token_interval_s=0.05))
    async with serving(fake, address) as server, connected(address) as client:
        batches: list[int] = []
        send = server._send

        def counting(identity: bytes, message: wire.ToGateway) -> bool:
            if isinstance(message, wire.Events):
                batches.append(len(message.events))
            return send(identity, message)

        monkeypatch.setattr(server, "_send", counting)
        await asyncio.gather(*(collect(client, request(f"r{i}", max_tokens=10)) for i in range(64)))
        assert sum(batches) == 64 * 12
        assert len(batches) < sum(batches) / 4


async def test_drain_refuses_new_and_waits_for_old(address: str) -> None:
    async with serving(FakeEngine(FakeScript(token_interval_s=0.01)), address), connected(address) as client:
        task = asyncio.create_task(collect(client, request(max_tokens=20)))
        await asyncio.sleep(0.05)
        drained = asyncio.create_task(client.drain())
        await asyncio.sleep(0)
        (refused,) = await collect(client, request("late"))
        assert isinstance(refused, Failed) and refused.code == "server_shutting_down"
        await asyncio.wait_for(drained, 60)
        assert isinstance((await task)[-1], Finished)


async def test_requests_that_a_drain_ends_report_what_was_computed(address: str) -> None:
    fake = FakeEngine(FakeScript(start_delay_s=60, prefilled_tokens=1))
    async with serving(fake, address), connected(address) as client:
        task = asyncio.create_task(collect(client, request(n=2)))
        await until(lambda: fake.running == 1)
        client.fail_open("the server is shutting down")
        async with asyncio.timeout(60):
            (failed,) = await task
        usage = {choice: Usage(1, 0, 0) for choice in range(2)}
        assert failed == Failed("r", "server_shutting_down", "the server is shutting down", usage=usage)
        assert client.open_requests == 0


async def test_the_last_events_are_sent_before_the_acknowledgement(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeEngine(FakeScript(faults=(Fault(kind="stall", after_tokens=1),)))
    async with serving(fake, address) as server, connected(address) as client:
        sent: list[wire.ToGateway] = []
        send = server._send

        def recording(identity: bytes, message: wire.ToGateway) -> bool:
            sent.append(message)
            return send(identity, message)

        monkeypatch.setattr(server, "_send", recording)
        task = asyncio.create_task(collect(client, request()))
        await until(lambda: any(isinstance(message, wire.Events) for message in sent))
        sent.clear()
        async with asyncio.timeout(60):
            await client.abort("r")
            await task
        kinds = [type(message) for message in sent if not isinstance(message, wire.Pong)]
        assert kinds == [wire.Events, wire.Aborted]
