"""The scripted engine keeps the event contract and does what its script says."""

import asyncio
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from loraplex.engine.fake_engine import CRASH_STATUS, DEFAULT_INFO, FakeEngine, FakeScript, Fault
from loraplex.engine.messages import (
    AdapterRef,
    Delta,
    EngineRequest,
    Event,
    Failed,
    Finished,
    Started,
    Usage,
)
from loraplex.engine.sampling_params import SamplingParams


def request(request_id: str = "r", adapter: str | None = None, **sampling: object) -> EngineRequest:
    namespace = b"n" * 32
    return EngineRequest(
        request_id=request_id,
        namespace=namespace,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(**{"max_tokens": 4, **sampling}),  # type: ignore[arg-type]
        adapter=AdapterRef(namespace=namespace, digest=adapter, blob_path="/blob") if adapter else None,
    )


async def play(engine: FakeEngine, asked: EngineRequest) -> list[Event]:
    return [event async for event in engine.submit(asked)]


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.choice == choice)


def tokens_of(events: list[Event], choice: int) -> list[int]:
    return [i for e in events if isinstance(e, Delta) and e.choice == choice for i in e.token_ids]


async def test_events_follow_the_contract() -> None:
    engine = FakeEngine(FakeScript(cached_tokens=2))
    events = await play(engine, request(n=2, adapter="a" * 64))
    assert events[0] == Started("r", "a" * 64, 2, system_fingerprint=DEFAULT_INFO.system_fingerprint)
    ends = [e for e in events if isinstance(e, Finished)]
    assert sorted(e.choice for e in ends) == [0, 1]
    assert {e.reason for e in ends} == {"length"}
    assert all(e.usage.completion_tokens == 4 and e.usage.cached_tokens == 2 for e in ends)
    assert text_of(events, 0) != text_of(events, 1)
    assert engine.running == 0
    assert engine.aborts == 0


@pytest.mark.parametrize("sampling", [{"n": 2}, {"stop": ["4", "99"]}, {"logprobs": 1}], ids=str)
async def test_what_another_one_began_goes_on(sampling: dict[str, Any]) -> None:
    wanted = request(max_tokens=9, **sampling)
    whole = await play(FakeEngine(), wanted)
    for cut in range(1, len(whole)):
        before = whole[:cut]
        open_choices = {*range(wanted.sampling.n)} - {e.choice for e in before if isinstance(e, Finished)}
        received = {choice: tokens_of(before, choice) for choice in open_choices}
        after = await play(FakeEngine(), msgspec.structs.replace(wanted, received=received))
        for choice in range(wanted.sampling.n):
            assert text_of([*before, *after], choice) == text_of(whole, choice)
        ends = [
            sorted(e.choice for e in each if isinstance(e, Finished)) for each in (whole, [*before, *after])
        ]
        assert ends[0] == ends[1]


@pytest.mark.parametrize(("keep", "expected"), [(False, "Hello wor"), (True, "Hello world!")])
async def test_stop_string_across_tokens(keep: bool, expected: str) -> None:
    engine = FakeEngine(FakeScript(answers=(("Hello", " wor", "ld", "! more", " text"),)))
    events = await play(engine, request(stop=("ld!",), max_tokens=10, include_stop_str_in_output=keep))
    assert text_of(events) == expected
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.stop, end.usage.completion_tokens) == ("stop", "ld!", 4)


async def test_answer_ends_with_stop_and_all_its_text() -> None:
    events = await play(FakeEngine(FakeScript(answers=(("a", "b"),))), request(stop=("zzz",), max_tokens=10))
    assert text_of(events) == "ab"
    assert isinstance(events[-1], Finished) and events[-1].reason == "stop"


async def test_tokens_per_delta_never_exceed_max_tokens() -> None:
    events = await play(FakeEngine(FakeScript(tokens_per_delta=3)), request(max_tokens=4, logprobs=2))
    deltas = [e for e in events if isinstance(e, Delta)]
    assert [len(e.token_ids) for e in deltas] == [3, 1]
    assert deltas[0].logprobs is not None and len(deltas[0].logprobs) == 3


async def test_wrong_digest_is_reported() -> None:
    events = await play(FakeEngine(FakeScript(digest="f" * 64)), request(adapter="a" * 64))
    assert events[0] == Started("r", "f" * 64, 0, system_fingerprint=DEFAULT_INFO.system_fingerprint)


@pytest.mark.parametrize(
    ("fault", "code", "deltas"),
    [
        (Fault(kind="nan", after_tokens=2), "non_finite_logits", 2),
        (Fault(kind="fail", code="overloaded"), "overloaded", 0),
        (Fault(kind="fail", code="timeout", after_tokens=1), "timeout", 1),
    ],
)
async def test_scripted_failures(fault: Fault, code: str, deltas: int) -> None:
    engine = FakeEngine(FakeScript(faults=(fault,)))
    events = await play(engine, request())
    assert isinstance(events[-1], Failed) and events[-1].code == code
    assert sum(isinstance(e, Delta) for e in events) == deltas
    assert (engine.running, engine.aborts) == (0, 0)


async def test_fault_of_one_request_spares_others_and_wears_off() -> None:
    engine = FakeEngine(FakeScript(faults=(Fault(kind="nan", request_id="bad", times=1),)))
    assert isinstance((await play(engine, request("good")))[-1], Finished)
    assert isinstance((await play(engine, request("bad")))[-1], Failed)
    assert isinstance((await play(engine, request("bad")))[-1], Finished)


async def test_too_long_prompt_and_bad_parameters_fail() -> None:
    engine = FakeEngine()
    for asked, code in (
        (request(max_tokens=5000), "context_length_exceeded"),
        (request(n=999), "invalid_request"),
    ):
        (event,) = await play(engine, asked)
        assert isinstance(event, Failed) and event.code == code and event.field


@pytest.mark.parametrize("kind", ["stall", "hang"])
async def test_abort_ends_a_stuck_request(kind: str) -> None:
    engine = FakeEngine(FakeScript(faults=(Fault(kind=kind, after_tokens=1),)))  # type: ignore[arg-type]
    task = asyncio.create_task(play(engine, request()))
    await asyncio.sleep(0.05)
    assert engine.running == 1
    assert (await engine.stats()).heartbeat_age_s > 0.0
    await engine.abort("r")
    await engine.abort("r")
    last = (await asyncio.wait_for(task, 60))[-1]
    assert isinstance(last, Finished) and last.reason == "abort"
    assert (engine.running, engine.aborts) == (0, 1)


async def test_an_abort_before_the_start_reports_the_scripted_part_of_the_prompt() -> None:
    engine = FakeEngine(FakeScript(start_delay_s=60, prefilled_tokens=2, cached_tokens=9))
    task = asyncio.create_task(play(engine, request()))
    await asyncio.sleep(0.01)
    await engine.abort("r")
    (last,) = await task
    assert isinstance(last, Finished) and last.usage == Usage(2, 2, 0)


async def test_closing_the_stream_aborts() -> None:
    engine = FakeEngine(FakeScript(token_interval_s=0.001))
    stream = engine.submit(request(max_tokens=1000))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (engine.running, engine.aborts) == (0, 1)


async def test_drain_refuses_new_and_finishes_old() -> None:
    engine = FakeEngine(FakeScript(token_interval_s=0.01))
    task = asyncio.create_task(play(engine, request()))
    await asyncio.sleep(0.005)
    drained = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    (refused,) = await play(engine, request("late"))
    assert isinstance(refused, Failed) and refused.code == "engine_draining"
    await asyncio.wait_for(drained, 60)
    assert isinstance((await task)[-1], Finished)


def test_crash_ends_the_process() -> None:
    code = (
        "import asyncio\n"
        "from loraplex.engine.fake_engine import *\n"
        "from loraplex.engine.messages import EngineRequest\n"
        "from loraplex.engine.sampling_params import SamplingParams\n"
        "engine = FakeEngine(FakeScript(faults=(Fault(kind='crash', after_tokens=1),)))\n"
        "request = EngineRequest(request_id='r', namespace=b'', prompt_token_ids=[1], sampling=SamplingParams(max_tokens=3))\n"
        "async def go():\n"
        "    async for event in engine.submit(request): pass\n"
        "asyncio.run(go())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == CRASH_STATUS
