"""Aborts at every stage, deadlines, forgotten tenants and closed iterators give everything back."""

import asyncio
import threading
import time
from typing import Any

import msgspec
import pytest
from tests.engine.local_engine.conftest import Source
from tests.engine.local_engine.engine_requests import (
    NAMESPACE,
    collect,
    finished,
    idle,
    replace_namespace,
    request,
    tokens,
)

from loraplex.engine.engine import Engine, StepResult
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.messages import (
    Delta,
    Event,
    Failed,
    Finished,
    Started,
    Usage,
)


async def test_abort_before_the_first_token(engine: LocalEngine, core: Engine, source: Source) -> None:
    stream = engine.submit(request(adapter="slow"))
    first = asyncio.ensure_future(anext(stream))
    assert await asyncio.to_thread(source.asked.wait, 60)
    assert not first.done()
    await engine.abort("r")
    aborted = await first
    assert isinstance(aborted, Finished) and aborted.reason == "abort"
    await idle(core)


@pytest.mark.parametrize("end", ["abort", "first_token_timeout_s", "total_timeout_s"])
@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_the_computed_part_of_a_prompt_is_reported(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch, steps: int, end: str
) -> None:
    """A step computes 256 tokens of a prompt of 700. One that is launched ahead counts."""
    wanted, reached, step, taken, late_s = request(), threading.Event(), core.step, 0, 0.0

    def limited_step() -> StepResult:
        nonlocal taken, late_s
        if core.scheduler.has_unfinished and taken < steps:
            taken += 1
            return step()
        reached.set()
        if end == "abort":
            return StepResult([], [], ran=False)
        late_s = 1000.0
        return step()

    monkeypatch.setattr(core, "step", limited_step)
    monkeypatch.setattr(core.scheduler, "_clock", lambda: time.monotonic() + late_s)
    prompt_ids = [index % 100 + 3 for index in range(700)]
    deadlines = {} if end == "abort" else {end: 600.0}
    wanted = msgspec.structs.replace(wanted, prompt_token_ids=prompt_ids, **deadlines)
    task = asyncio.ensure_future(collect(engine, wanted))
    assert await asyncio.to_thread(reached.wait, 60)
    if end == "abort":
        await engine.abort("r")
    async with asyncio.timeout(60):
        (last,) = await task
    used = Usage(256 * steps, 0, 0)
    if end == "abort":
        assert last == Finished("r", 0, "abort", used)
    else:
        assert isinstance(last, Failed) and (last.code, last.usage) == ("timeout", {0: used})
    monkeypatch.setattr(core, "step", step)
    await idle(core)


async def test_abort_while_it_streams(engine: LocalEngine, core: Engine) -> None:
    stream = engine.submit(request(max_tokens=3000))
    async with asyncio.timeout(60):
        assert isinstance(await anext(stream), Started)
        assert isinstance(await anext(stream), Delta)
        await engine.abort("r")
        rest = [event async for event in stream]
    assert isinstance(rest[-1], Finished) and rest[-1].reason == "abort"
    assert (await idle(core)).aborted_requests == 1


async def test_a_forgotten_tenant_ends_and_leaves_no_block(engine: LocalEngine, core: Engine) -> None:
    other = replace_namespace(request("other", max_tokens=40), b"o" * 32)
    kept = asyncio.ensure_future(collect(engine, other))
    stream = engine.submit(request(max_tokens=3000))
    async with asyncio.timeout(60):
        assert isinstance(await anext(stream), Started)
        await engine.forget(NAMESPACE)
        rest = [event async for event in stream]
        assert isinstance(rest[-1], Failed) and rest[-1].code == "namespace_forgotten"
        assert rest[-1].usage == {}
        assert finished(await kept)
    cached = (await idle(core)).cached_blocks
    assert cached > 0
    # Only the other tenant's blocks were left: forgetting it as well leaves none.
    await engine.forget(NAMESPACE)
    assert (await idle(core)).cached_blocks == cached
    await engine.forget(other.namespace)
    assert (await idle(core)).cached_blocks == 0


async def test_abort_is_idempotent_and_ignores_unknown_requests(engine: LocalEngine) -> None:
    await engine.abort("never seen")
    events = await collect(engine, request())
    await engine.abort("r")
    await engine.abort("r")
    assert finished(events)
    assert (await engine.stats()).aborted_requests == 0


async def test_an_id_may_be_used_again_after_an_abort(engine: LocalEngine) -> None:
    stream = engine.submit(request(max_tokens=3000))
    await anext(stream)
    await engine.abort("r")
    assert [event async for event in stream]
    events = await collect(engine, request())
    assert len(tokens(events)) == 12 and finished(events)


async def test_closing_the_iterator_frees_the_engine(engine: LocalEngine, core: Engine) -> None:
    stream = engine.submit(request(max_tokens=3000))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await idle(core)).generation_tokens < 3000


async def test_an_abort_does_not_finish_a_stopped_choice_again(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 7}
    whole = await collect(engine, request("whole", max_tokens=30, **sampling))
    stop = "".join(f"<{i}>" for i in tokens(whole, 0)[4:6])
    # The step thread learns of the stop string late: never.
    monkeypatch.setattr(core, "finish", lambda sequence, reason: None)
    stream = engine.submit(request(max_tokens=3000, stop=(stop,), **sampling))
    events: list[Event] = []
    async with asyncio.timeout(60):
        async for event in stream:
            events.append(event)
            if isinstance(event, Finished) and event.reason == "stop":
                await engine.abort("r")
    assert [(end.choice, end.reason) for end in finished(events)] == [(0, "stop"), (1, "abort")]
