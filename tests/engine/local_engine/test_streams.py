"""Streams of a `LocalEngine`: events, choices, stop strings, refusals and drain."""

import asyncio
from typing import Any

import pytest
from tests.engine.local_engine.conftest import Source
from tests.engine.local_engine.engine_requests import VOCAB, collect, finished, idle, request, text, tokens

from loraplex.engine import local_engine
from loraplex.engine.engine import Engine
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.messages import (
    Delta,
    Failed,
    Started,
)


async def test_a_stream_starts_runs_and_ends_once(engine: LocalEngine) -> None:
    events = await collect(engine, request())
    started = events[0]
    assert isinstance(started, Started)
    assert (started.request_id, started.digest, started.cached_tokens) == ("r", None, 0)
    assert started.queue_s > 0 and started.prefill_s > 0
    assert len(tokens(events)) == 12
    (end,) = finished(events)
    assert end is events[-1] and end.reason == "length"
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 12)
    assert text(events) == "".join(f"<{i}>" for i in tokens(events))


async def test_streams_run_together_and_alike(engine: LocalEngine) -> None:
    async with asyncio.timeout(60):
        all_events = await asyncio.gather(*(collect(engine, request(f"r{i}")) for i in range(20)))
    assert len({text(events) for events in all_events}) == 1
    assert all(event.request_id == f"r{i}" for i, events in enumerate(all_events) for event in events)


async def test_a_step_in_flight_is_completed_before_the_loop_waits(
    engine: LocalEngine, core: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sends anything more: an adapter that the step reads would stay pinned for as long."""
    monkeypatch.setattr(local_engine, "IDLE_WAIT_S", 600.0)
    stop = tokens(await collect(engine, request()))[4]
    await collect(engine, request(stop_token_ids=(stop,)))
    await idle(core)


async def test_each_choice_finishes_once(engine: LocalEngine) -> None:
    events = await collect(engine, request(n=3, temperature=1.0, seed=3))
    assert sorted(end.choice for end in finished(events)) == [0, 1, 2]
    assert len({tuple(tokens(events, choice)) for choice in range(3)}) == 3
    assert sum(isinstance(event, Started) for event in events) == 1


async def test_a_stop_string_across_tokens_ends_the_sequence(engine: LocalEngine, core: Engine) -> None:
    whole = text(await collect(engine, request("whole", max_tokens=40)))
    words = whole.split(">")
    stop = f"{words[3][-1]}>{words[4][:2]}"
    events = await collect(engine, request("stopped", max_tokens=3000, stop=(stop,)))
    (end,) = finished(events)
    assert (end.reason, end.stop) == ("stop", stop)
    assert text(events) == whole[: whole.index(stop)]
    assert end.usage.completion_tokens < 40
    assert (await idle(core)).generation_tokens < 3000


async def test_a_stop_string_ends_one_choice_of_many(engine: LocalEngine) -> None:
    sampling: dict[str, Any] = {"n": 4, "temperature": 1.0, "seed": 5, "max_tokens": 30}
    whole = await collect(engine, request("whole", **sampling))
    stop = "".join(f"<{i}>" for i in tokens(whole, 2)[4:6])
    events = await collect(engine, request("stopped", stop=(stop,), **sampling))
    reasons = {end.choice: end.reason for end in finished(events)}
    assert reasons[2] == "stop" and "length" in reasons.values()
    for choice in range(4):
        assert text(events, choice) == text(whole, choice).partition(stop)[0]


async def test_an_unknown_adapter_fails_alone(engine: LocalEngine, source: Source) -> None:
    source.gate.set()
    bad, good = await asyncio.gather(
        collect(engine, request("bad", adapter="unknown")), collect(engine, request("good"))
    )
    assert bad == [Failed("bad", "adapter_load_failed", "no adapter unknown")]
    assert finished(good)
    assert (await engine.stats()).adapter_load_failures == 1


async def test_invalid_requests_fail_with_their_field(engine: LocalEngine) -> None:
    (failed,) = await collect(engine, request(max_tokens=100_000))
    assert isinstance(failed, Failed)
    assert (failed.code, failed.field) == ("context_length_exceeded", "prompt")


async def test_an_id_in_use_is_refused(engine: LocalEngine) -> None:
    stream = engine.submit(request(max_tokens=3000))
    await anext(stream)
    (failed,) = await collect(engine, request())
    assert isinstance(failed, Failed) and failed.field == "request_id"
    assert isinstance(await anext(stream), Delta)
    await stream.aclose()  # type: ignore[attr-defined]


async def test_stats_count(engine: LocalEngine) -> None:
    await collect(engine, request("one"))
    await collect(engine, request("two"))
    stats = await engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (6, 24)
    assert stats.steps >= 24 and stats.step_seconds > 0
    assert stats.heartbeat_age_s < 60 and not stats.draining
    assert engine.info().vocab_size == VOCAB and engine.info().dtype == "float32"


async def test_drain_waits_for_the_running_and_refuses_the_new(engine: LocalEngine) -> None:
    running = engine.submit(request("running", max_tokens=600))
    assert isinstance(await anext(running), Started)
    drained = asyncio.ensure_future(engine.drain())
    await asyncio.sleep(0)
    (refused,) = await collect(engine, request("late"))
    assert isinstance(refused, Failed) and refused.code == "engine_draining"
    assert not drained.done()
    async with asyncio.timeout(60):
        assert len(tokens([event async for event in running])) == 600
        await drained
    assert (await engine.stats()).draining
