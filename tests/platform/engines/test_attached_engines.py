"""Engines of other processes come and go with their sockets; an engine of another model gets no request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.platform.engines.engine_socket import request, serving, until

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import DEFAULT_INFO, FakeEngine, FakeScript
from loraplex.engine.messages import Finished
from loraplex.platform.engines import attached_engines
from loraplex.platform.engines.attached_engines import AttachedEngines, existing
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.engines.remote_client import RemoteEngine
from loraplex.platform.errors import EngineNotAdded
from loraplex.platform.startup_errors import EngineStartFailed

OTHER = FakeScript(info=msgspec.structs.replace(DEFAULT_INFO, model_digest="1" * 64))


@asynccontextmanager
async def attached(pool: EnginePool, *addresses: str) -> AsyncIterator[AttachedEngines]:
    engines = AttachedEngines(pool, addresses, RemoteEngine)
    try:
        yield engines
    finally:
        await engines.close()


async def updated(engines: AttachedEngines, pool: EnginePool, numbers: list[int]) -> None:
    """Update until the connected engines have these numbers."""
    async with asyncio.timeout(60):
        await engines.update()
        while sorted(n for n, each in pool.engines.items() if each.connected) != numbers:
            await engines.update()
            await asyncio.sleep(0.02)


async def test_engines_of_a_pattern_come_and_go_and_keep_their_numbers(tmp_path: Path) -> None:
    pool, folder = EnginePool(), f"ipc://{tmp_path}/run"
    async with attached(pool, f"{folder}/*.sock") as engines:
        await engines.update()
        assert not pool.engines
        with pytest.raises(EngineStartFailed, match=r"no engine responds at ipc://.*/\*\.sock"):
            await engines.start(0.05)
        async with serving(FakeEngine(), f"{folder}/a.sock"):
            start = asyncio.create_task(engines.start(60))
            await updated(engines, pool, [0])
            await start
            async with serving(FakeEngine(), f"{folder}/b.sock") as leaving:
                await updated(engines, pool, [0, 1])
                leaving.begin_drain(0.0)
                await leaving.drain()
            await updated(engines, pool, [0])
            assert list(pool.engines) == [0]
            async with serving(FakeEngine(), f"{folder}/b.sock"), serving(FakeEngine(), f"{folder}/c.sock"):
                await updated(engines, pool, [0, 1, 2])
                assert pool.engines[1].address == f"{folder}/b.sock"


async def test_a_plain_address_stays_while_its_engine_is_away(tmp_path: Path) -> None:
    pool, address = EnginePool(), f"ipc://{tmp_path}/run/a.sock"
    async with attached(pool, address) as engines:
        assert list(pool.engines) == [0]
        async with serving(FakeEngine(), address):
            await engines.start(60)
        await engines.update()
        assert list(pool.engines) == [0]


async def test_open_requests_of_an_engine_whose_socket_is_gone_end_first(tmp_path: Path) -> None:
    pool, address = EnginePool(), f"ipc://{tmp_path}/run/a.sock"
    slow = FakeEngine(FakeScript(token_interval_s=0.01))
    async with attached(pool, f"ipc://{tmp_path}/run/*.sock") as engines, serving(slow, address):
        await updated(engines, pool, [0])
        stream = pool.submit(request("r", max_tokens=30))
        await anext(stream)
        (tmp_path / "run" / "a.sock").unlink()
        await engines.update()
        assert list(pool.engines) == [0]
        assert isinstance([event async for event in stream][-1], Finished)
        await engines.update()
        assert not pool.engines


async def test_an_engine_of_another_model_gets_no_request(tmp_path: Path) -> None:
    pool, folder = EnginePool(), f"ipc://{tmp_path}/run"
    plain = f"ipc://{tmp_path}/plain/d.sock"
    async with attached(pool, f"{folder}/*.sock", plain) as engines, AsyncExitStack() as stack:
        await stack.enter_async_context(serving(FakeEngine(), f"{folder}/a.sock"))
        await updated(engines, pool, [1])
        await engines.start(60)
        with capture_logs() as logs:
            for name in (f"{folder}/b.sock", plain):
                await stack.enter_async_context(serving(FakeEngine(OTHER), name))
            await until(lambda: pool.engines[0].connected)
            await updated(engines, pool, [1])
            await engines.update()
        assert [line["address"] for line in logs if line["log_level"] == "error"] == [plain]
        with pytest.raises(EngineNotAdded, match="serves another model"):
            other = f"ipc://{tmp_path}/other/e.sock"
            await stack.enter_async_context(serving(FakeEngine(OTHER), other))
            await engines.add(other, None)


async def test_an_engine_is_added_by_its_address_and_drained_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_engines, "ADD_TIMEOUT_S", 0.2)
    pool, folder = EnginePool(), f"ipc://{tmp_path}/run"
    async with attached(pool, f"{folder}/a.sock") as engines, serving(FakeEngine(), f"{folder}/a.sock"):
        await engines.start(60)
        for address, reason in (
            (None, "starts no engine"),
            (f"{folder}/a.sock", "attached already"),
            ("tcp://a:1", "allowed is ipc://"),
            (f"{folder}/none.sock", "no engine responds"),
        ):
            with pytest.raises(EngineNotAdded, match=reason):
                await engines.add(address, None)
        monkeypatch.setattr(attached_engines, "ADD_TIMEOUT_S", 60)
        async with serving(FakeEngine(), f"{folder}/b.sock") as server:
            assert await engines.add(f"{folder}/b.sock", None) == 1
            await engines.drain(1, 0.0)
            await asyncio.wait_for(server.draining.wait(), 60)
            await server.drain()
        await updated(engines, pool, [0])
        assert list(pool.engines) == [0]
        with pytest.raises(EngineUnavailable):
            await engines.drain(7, 0.0)


def test_only_sockets_that_may_exist(tmp_path: Path) -> None:
    (tmp_path / "a.sock").touch()
    (tmp_path / ("b" * 120 + ".sock")).touch()
    assert existing([f"ipc://{tmp_path}/*.sock", f"ipc://{tmp_path}/c.sock"]) == {f"ipc://{tmp_path}/a.sock"}
