"""Requests that lose their engine: another one goes on with them, and they are refused once engines died of them twice."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from loraplex.engine.errors import EngineDraining, EngineLost, EngineUnavailable
from loraplex.engine.fake_engine import FakeEngine, FakeScript, Fault
from loraplex.engine.messages import DEADLINES
from loraplex.platform.inference.dependencies import ServingConfig

MODEL = "demo/base"
USER: Any = [{"role": "user", "content": "hello"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
DIGEST = "d" * 64


def lost(after_tokens: int = 0, times: int | None = 1, code: str = EngineLost.code) -> FakeScript:
    """An engine that is lost `times` times, each time after so many tokens."""
    fault = Fault(kind="fail", code=code, message="it ended", after_tokens=after_tokens, times=times)
    return FakeScript(faults=(fault,))


async def ask(gateway: Any, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": USER, "max_tokens": 5, **fields}
    response: httpx.Response = await gateway.post("/v1/chat/completions", body)
    return response


def settled(gateway: Any) -> list[tuple[str, int, int]]:
    """(outcome, prompt tokens, response tokens) of every reservation; there are no others."""
    assert len(gateway.admissions.asked) == len(gateway.admissions.settled)
    usage = [usage for _, usage in gateway.admissions.settled]
    return [(each.outcome, each.prompt_tokens, each.completion_tokens) for each in usage]


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_byte_a_request_is_submitted_once_more(
    start_gateway: Any, stream: bool
) -> None:
    gateway = await start_gateway(lost())
    response = await ask(gateway, stream=stream)
    assert response.status_code == 200, response.text
    assert ("[DONE]" in response.text) == stream
    first, second = gateway.engine.requests
    assert first.request_id == second.request_id
    assert len(second.timeouts) == len(DEADLINES)
    assert all(seconds < first.timeouts[kind] for kind, seconds in second.timeouts.items())
    assert settled(gateway) == [("completed", len(first.prompt_token_ids), 5)]
    assert [each.finish_reason for each in gateway.recorder.timings] == ["length"]


@pytest.mark.parametrize("stream", [False, True])
async def test_never_twice(start_gateway: Any, stream: bool) -> None:
    gateway = await start_gateway(lost(times=None))
    response = await ask(gateway, stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert response.headers["x-should-retry"] == "false" and "retry-after" not in response.headers
    assert len(gateway.engine.requests) == 2
    assert settled(gateway) == [("failed", 0, 0)]


def deltas(response: httpx.Response) -> list[str]:
    """The text of each event of a stream that ended well."""
    *events, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]", response.text
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return ["".join(c["delta"].get("content") or "" for c in chunk["choices"]) for chunk in chunks]


@pytest.mark.parametrize("code", [EngineLost.code, EngineDraining.code])
@pytest.mark.parametrize("tokens", [1, 3, 4])
async def test_a_stream_goes_on_behind_what_was_sent(start_gateway: Any, tokens: int, code: str) -> None:
    gateway = await start_gateway(lost(after_tokens=tokens, code=code))
    whole = deltas(await ask(gateway, stream=True, temperature=1.0))
    first, second = gateway.engine.requests
    assert first.request_id == second.request_id and first.sampling.seed is not None
    assert first.sampling == second.sampling and [*map(len, second.received.values())] == [tokens]
    assert deltas(await ask(gateway, stream=True)) == whole
    assert settled(gateway) == [("completed", len(first.prompt_token_ids), 5)] * 2
    assert [each.resumed for each in gateway.recorder.timings] == [1, 0]


async def test_an_engine_that_is_lost_behind_the_last_token_costs_nothing(start_gateway: Any) -> None:
    gateway = await start_gateway(lost(after_tokens=5))
    assert len("".join(deltas(await ask(gateway, stream=True))).split()) == 5
    assert len(gateway.engine.requests) == 1


async def test_choices_that_ended_stay_ended(start_gateway: Any) -> None:
    answers = (("a",), ("b", "c", "d", "e"), ("f", "g"))
    script = replace(lost(after_tokens=2), answers=answers)
    gateway = await start_gateway(script)
    response = await ask(gateway, n=3)
    assert [c["message"]["content"] for c in response.json()["choices"]] == ["a", "bcde", "fg"]
    assert response.headers["x-loraplex-resumed"] == "1"
    assert sorted(gateway.engine.requests[1].received) == [1]
    assert settled(gateway) == [("completed", len(gateway.engine.requests[0].prompt_token_ids), 7)]
    assert "x-loraplex-resumed" not in (await ask(gateway, n=3)).headers


async def test_a_second_death_ends_a_stream(start_gateway: Any) -> None:
    gateway = await start_gateway(lost(after_tokens=2, times=2))
    response = await ask(gateway, stream=True)
    *_, error, end = response.text.split("\n\n")
    assert response.status_code == 200 and end == ""
    assert json.loads(error.removeprefix("event: error\ndata: "))["error"]["code"] == "engine_unavailable"
    assert "[DONE]" not in response.text
    assert len(gateway.engine.requests) == 2
    assert [usage[0::2] for usage in settled(gateway)] == [("failed", 4)]


async def test_a_drain_is_no_death(start_gateway: Any) -> None:
    faults = [
        Fault(kind="fail", code=code, message="it ended", after_tokens=1, times=1)
        for code in (EngineDraining.code, EngineLost.code)
    ]
    gateway = await start_gateway(FakeScript(faults=(faults[0], replace(faults[1], after_tokens=2))))
    assert (await ask(gateway)).headers["x-loraplex-resumed"] == "2"


async def test_three_engines_that_drain_are_too_many(start_gateway: Any) -> None:
    gateway = await start_gateway(lost(after_tokens=1, times=3, code=EngineDraining.code))
    assert (await ask(gateway)).json()["error"]["code"] == "engine_unavailable"
    assert len(gateway.engine.requests) == 3


async def test_an_engine_that_drains_is_asked_again_and_another_one_takes_it(start_gateway: Any) -> None:
    gateway = await start_gateway(lost(times=5, code=EngineDraining.code))
    response = await ask(gateway)
    assert response.status_code == 200 and "x-loraplex-resumed" not in response.headers
    assert len(gateway.engine.requests) == 6


@pytest.mark.parametrize("change", ["digest", "fingerprint"])
async def test_another_model_does_not_go_on(start_gateway: Any, change: str) -> None:
    gateway = await start_gateway(lost(after_tokens=2))
    other, played = FakeEngine(FakeScript(digest="e" * 64)), gateway.engine.submit
    if change == "fingerprint":
        info = replace(other.script.info, system_fingerprint="fp_other")
        other = FakeEngine(FakeScript(info=info))
    gateway.engine.submit = lambda request: (other.submit if request.received else played)(request)
    response = await ask(gateway, stream=True)
    assert "serves another model" in response.text and '"engine_unavailable"' in response.text
    assert [usage[0::2] for usage in settled(gateway)] == [("failed", 2)]


async def test_an_engine_that_refuses_is_not_asked_again(start_gateway: Any) -> None:
    gateway = await start_gateway(lost(code=EngineUnavailable.code))
    assert (await ask(gateway)).status_code == 503
    assert len(gateway.engine.requests) == 1


@pytest.mark.parametrize(("wait_s", "queue_timeout_s"), [(0.1, 60.0), (60.0, 0.1), (60.0, None)])
async def test_the_wait_for_an_engine_is_bounded(
    start_gateway: Any, wait_s: float, queue_timeout_s: float | None
) -> None:
    limits = ServingConfig(
        key_cache_s=0.0,
        queue_timeout_s=queue_timeout_s,
        total_timeout_s=60.0 if queue_timeout_s else 0.1,
        engine_restart_s=wait_s,
    )
    gateway = await start_gateway(lost(), limits)
    gateway.engine.wait_ready = asyncio.Event().wait
    async with asyncio.timeout(60):
        response = await ask(gateway)
    code = "engine_unavailable" if queue_timeout_s else "timeout"
    assert response.json()["error"]["code"] == code
    assert len(gateway.engine.requests) == 1
    assert settled(gateway) == [("failed", 0, 0)]


async def test_a_client_that_leaves_ends_the_wait_for_an_engine(start_gateway: Any) -> None:
    gateway = await start_gateway(lost())
    waiting = asyncio.Event()

    async def wait_ready() -> None:
        waiting.set()
        await asyncio.Event().wait()

    gateway.engine.wait_ready = wait_ready
    leaving = asyncio.create_task(ask(gateway))
    async with asyncio.timeout(60):
        await waiting.wait()
        leaving.cancel()
        while not gateway.admissions.settled:
            await asyncio.sleep(0.01)
    assert settled(gateway) == [("aborted", 0, 0)]


async def test_an_adapter_in_use_at_two_deaths_is_refused_to_its_tenant(start_gateway: Any) -> None:
    gateway = await start_gateway()
    await gateway.adapter("acme", "mine", DIGEST)
    assert (await ask(gateway, model="mine")).status_code == 200
    (poison,) = gateway.engine.requests
    gateway.poison_memory.record_death([poison])
    assert (await ask(gateway, model="mine")).status_code == 200
    for request_id in ("second", "third"):
        gateway.poison_memory.record_death([replace(poison, request_id=request_id)])
    response = await ask(gateway, model="mine")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "adapter_quarantined")
    assert response.headers["retry-after"]
    assert (await ask(gateway)).status_code == 200
    gateway.key = await gateway.tenant("umbrella")
    await gateway.adapter("umbrella", "mine", DIGEST)
    assert (await ask(gateway, model="mine")).status_code == 200
    assert len(gateway.engine.requests) == 4
    assert len(gateway.admissions.asked) == len(gateway.admissions.settled) + len(
        gateway.admissions.cancelled
    )


async def test_a_grammar_in_use_at_two_deaths_is_refused_by_name(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("{", "}"),)))
    assert (await ask(gateway, response_format=FORMAT)).status_code == 200
    (poison,) = gateway.engine.requests
    for request_id in ("first", "second"):
        gateway.poison_memory.record_death([replace(poison, request_id=request_id)])
    response = await ask(gateway, response_format=FORMAT)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "schema_too_costly")
    assert error["param"] == "response_format.json_schema.schema"
    assert "engines ended while they ran this grammar" in error["message"]
    assert (await ask(gateway)).status_code == 200
    assert gateway.poison_memory.refusals == {"grammar": 1}
