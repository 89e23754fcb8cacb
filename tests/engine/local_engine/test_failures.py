"""A step loop or output thread that dies fails all requests; a request that breaks its steps fails alone."""

import asyncio
import threading

import pytest
from tests.engine.local_engine.engine_requests import collect, finished, idle, request

from loraplex.engine.batch.step_plan import PlannedRow, StepPlan
from loraplex.engine.engine import Engine, StepResult
from loraplex.engine.errors import EngineLost, EngineUnavailable
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.messages import (
    EngineRequest,
    Failed,
    Started,
)
from loraplex.engine.runner.launched_step import LaunchedStep


async def test_a_dead_step_loop_fails_all_requests(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [engine.submit(request(f"r{i}", max_tokens=3000)) for i in range(3)]
    for stream in streams:
        assert isinstance(await anext(stream), Started)

    def crash() -> StepResult:
        raise RuntimeError("a defect")

    monkeypatch.setattr(core, "step", crash)
    async with asyncio.timeout(60):
        for stream in streams:
            events = [event async for event in stream]
            assert isinstance(events[-1], Failed) and events[-1].code == EngineLost.code
        (refused,) = await collect(engine, request("late"))
        assert isinstance(refused, Failed) and refused.code == EngineUnavailable.code
        with pytest.raises(EngineUnavailable):
            await engine.stats()
        await engine.abort("r0")
        await engine.drain()


async def test_a_request_that_makes_its_steps_raise_fails_alone(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = core.runner.launch

    def launch_or_raise(plan: StepPlan, rows: list[PlannedRow] | None = None) -> LaunchedStep:
        if any(row.sequence.request_id == "bad" for row in plan.rows):
            raise RuntimeError("a defect")
        return launch(plan, rows)

    monkeypatch.setattr(core.runner, "launch", launch_or_raise)
    async with asyncio.timeout(60):
        bad, good = await asyncio.gather(*(collect(engine, request(name)) for name in ("bad", "good")))
    assert bad == [Failed("bad", "engine_error", "the computation of this request failed")]
    assert finished(good)[0].reason == "length"
    await idle(core)


async def test_an_abort_on_its_way_to_a_dying_loop_returns(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate = threading.Event(), threading.Event()

    def crash() -> StepResult:
        entered.set()
        gate.wait(60)
        raise RuntimeError("a defect")

    monkeypatch.setattr(core, "step", crash)
    running = asyncio.ensure_future(collect(engine, request()))
    assert await asyncio.to_thread(entered.wait, 60)
    abort = asyncio.ensure_future(engine.abort("r"))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(abort, 60)
    assert isinstance((await asyncio.wait_for(running, 60))[-1], Failed)


async def test_a_cancelled_abort_harms_no_other_request(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate, step = threading.Event(), threading.Event(), core.step

    def slow_step() -> StepResult:
        entered.set()
        gate.wait(60)
        return step()

    monkeypatch.setattr(core, "step", slow_step)
    running = asyncio.ensure_future(collect(engine, request("running")))
    assert await asyncio.to_thread(entered.wait, 60)
    abort = asyncio.ensure_future(engine.abort("another"))
    await asyncio.sleep(0)
    abort.cancel()
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(60):
        assert finished(await running)
        await engine.abort("another")
    await engine.stats()


async def test_close_ends_every_stream_and_what_comes_later_is_refused(engine: LocalEngine) -> None:
    stream = engine.submit(request(max_tokens=3000))
    assert isinstance(await anext(stream), Started)
    async with asyncio.timeout(60):
        await engine.close()
        last = [event async for event in stream][-1]
        assert last == Failed("r", EngineUnavailable.code, "the engine is closed")
        assert isinstance((await collect(engine, request("late")))[0], Failed)
        await engine.abort("r")
        await engine.drain()
        with pytest.raises(EngineUnavailable, match="closed"):
            await engine.stats()
        await engine.close()


async def test_a_dead_output_thread_fails_all_requests(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(wanted: EngineRequest) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(engine._processor, "start", crash)
    async with asyncio.timeout(60):
        (failed,) = await collect(engine, request())
        assert failed == Failed("r", EngineLost.code, "the engine failed")
        with pytest.raises(EngineUnavailable):
            await engine.stats()
