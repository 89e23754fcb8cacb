"""All engine events are counted, also after the client has left."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from loraplex.engine.fake_engine import FakeEngine, FakeScript, Fault
from loraplex.engine.messages import Delta, EngineRequest, Event, Finished, Started
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.inference import engine_streams
from loraplex.platform.inference.engine_streams import EngineStreams
from loraplex.platform.observability.request_stats import RequestStats


def request(name: str, max_tokens: int = 5) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(request_id=name, namespace=bytes(32), prompt_token_ids=[1, 2, 3], sampling=sampling)


def streams(engine: FakeEngine, *requests: EngineRequest) -> tuple[EngineStreams, RequestStats]:
    lengths = [len(each.prompt_token_ids) for each in requests]
    meter = RequestStats(arrival=0.0, n=1, max_tokens=5, prompt_lengths=lengths)
    return EngineStreams(engine, requests, meter), meter


async def test_events_of_all_prompts_and_then_none() -> None:
    opened, meter = streams(FakeEngine(), request("a"), request("b"))
    seen: list[tuple[int, Event]] = []
    while (event := await opened.next()) is not None:
        seen.append(event)
    for prompt in (0, 1):
        events = [event for each, event in seen if each == prompt]
        assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    assert (meter.prompt_tokens, meter.completion_tokens, meter.finished_choices) == (6, 10, 2)
    assert await opened.next() is None
    await opened.close()


async def test_unread_tokens_are_counted_when_the_client_leaves() -> None:
    engine = FakeEngine(FakeScript(token_interval_s=0.001))
    opened, meter = streams(engine, request("a", 1000))
    assert await opened.next() is not None
    await asyncio.sleep(0.05)
    await opened.close()
    made = (await engine.stats()).generation_tokens
    assert engine.running == 0 and engine.aborts == 1
    # The reader stopped at a full queue; the rest is in the engine's last word.
    assert meter.completion_tokens == made > engine_streams.WAITING_EVENTS
    assert meter.finished_choices == 0


async def test_prompts_have_their_turns_where_the_consumer_is_slow() -> None:
    """The engine's buffer fails a request whose events stay unread for long."""

    class Ahead(FakeEngine):
        aborted = False

        async def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
            yield Started(request.request_id, None, 0)
            while not self.aborted:
                yield Delta(request.request_id, 0, [1], "x")

        async def abort(self, request_id: str) -> None:
            self.aborted = True

    opened, _ = streams(Ahead(), *map(request, "abc"))
    read = [0, 0, 0]
    for _ in range(150):
        # All readers wait for room again.
        await asyncio.sleep(0.001)
        prompt, _ = await opened.next() or (0, None)
        read[prompt] += 1
    await opened.close()
    assert min(read) > 40


async def test_what_scores_behind_a_prompt_has_the_rest_of_its_time() -> None:
    class Slow(FakeEngine):
        async def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
            await asyncio.sleep(0.1)
            async for event in super().submit(request):
                yield event

    engine = Slow()
    requests = [replace(request(name), total_timeout_s=5.0, queue_timeout_s=1.0) for name in "ab"]
    meter = RequestStats(arrival=0.0, n=1, max_tokens=5, prompt_lengths=[3, 3])
    opened = EngineStreams(engine, requests, meter, after={1: 0})
    while await opened.next() is not None:
        continue
    first, second = engine.requests
    assert first.total_timeout_s == 5.0 and second.queue_timeout_s == 1.0
    assert second.total_timeout_s is not None and 4.0 < second.total_timeout_s <= 4.9


async def test_a_cancelled_consumer_loses_no_event() -> None:
    engine = FakeEngine(FakeScript(token_interval_s=0.01))
    opened, meter = streams(engine, request("a", 20))
    tokens = 0
    while True:
        try:
            async with asyncio.timeout(0.004):
                event = await opened.next()
        except TimeoutError:
            continue
        if event is None:
            break
        tokens += len(event[1].token_ids) if isinstance(event[1], Delta) else 0
    await opened.close()
    assert tokens == meter.completion_tokens == 20


async def test_a_task_that_has_not_begun_submits_nothing_after_close() -> None:
    engine = FakeEngine()
    opened, meter = streams(engine, request("a"))
    await opened.close()
    assert engine.requests == [] and meter.prompt_tokens == 0


async def test_waiting_for_an_engine_that_does_not_end_a_request_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_streams, "ABORT_S", 0.1)

    class Deaf(FakeEngine):
        async def abort(self, request_id: str) -> None:
            return

    opened, meter = streams(Deaf(FakeScript(faults=(Fault(kind="stall", after_tokens=2),))), request("a"))
    while meter.completion_tokens < 2:
        await opened.next()
    async with asyncio.timeout(60):
        await opened.close()
    assert meter.completion_tokens == 2


async def test_a_stream_that_raises_ends_like_a_lost_one() -> None:
    class Broken(FakeEngine):
        async def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
            yield Started(request.request_id, None, 0)
            raise RuntimeError("a defect")

    opened, meter = streams(Broken(), request("a"))
    assert isinstance((await opened.next() or (0, None))[1], Started)
    assert await opened.next() is None
    assert meter.prompt_tokens == 3
    await opened.close()
