"""The timeline of a request has every phase of its kind, on one clock that begins with the authentication, without a gap."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from tests.platform.web.gateway import BASE_MODEL, StartGateway

from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.engine.messages import WaitCauses
from loraplex.platform.observability.request_record import FinishedRequest
from loraplex.platform.web.usage.phase_reasons import WAITS
from loraplex.platform.web.usage.request_pages import PHASE_NAMES

MESSAGES = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string"}}}
SCRIPT = FakeScript(answers=(("a", "b", "c"),), token_interval_s=0.02, queue_s=0.1, prefill_s=0.05)
GRAMMAR = msgspec.structs.replace(SCRIPT, grammar_s=0.1)
LOAD = msgspec.structs.replace(SCRIPT, queue_s=0.15, adapter_s=0.1)
GATEWAY = ("auth", "body", "prepare", "admission", "adapter_fetch")
ENGINE = ("transport", "queue", "prefill")
READ = ("journal", "delivery", "decode", "finish")
"""`adapter_fetch` and `journal` take no time that a clock must tell, where there is nothing to fetch and the disk is quick."""
SOMETIMES = {"adapter_fetch", "journal"}
KINDS: dict[str, tuple[FakeScript, dict[str, Any], tuple[str, ...]]] = {
    "plain": (SCRIPT, {}, (*GATEWAY, *ENGINE, *READ)),
    "stream": (SCRIPT, {"stream": True}, (*GATEWAY, *ENGINE, *READ)),
    "choices": (SCRIPT, {"n": 2}, (*GATEWAY, *ENGINE, *READ)),
    "grammar": (
        GRAMMAR,
        {"response_format": SCHEMA},
        (*GATEWAY, "schema_check", "transport", "grammar_compile", "prefill", *READ),
    ),
    "adapter": (LOAD, {"model": "tuned"}, (*GATEWAY, "transport", "adapter_load", "queue", "prefill", *READ)),
    "never started": (
        FakeScript(faults=(Fault(kind="fail", code="engine_timeout"),)),
        {},
        (*GATEWAY, "transport", "engine"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_phases_add_up_to_the_duration(start_gateway: StartGateway, kind: str) -> None:
    script, fields, names = KINDS[kind]
    ended: list[FinishedRequest] = []
    gateway = await start_gateway(script, observers=[ended.append])
    await gateway.adapter("acme", "tuned", "d" * 64)
    await gateway.post("/v1/chat/completions", {"model": BASE_MODEL, "messages": MESSAGES, **fields})
    (stats,), (finished,) = gateway.recorder.timings, ended
    phases = list(stats.phases())
    assert [name for name, *_ in phases if name not in SOMETIMES] == [
        name for name in names if name not in SOMETIMES
    ]
    assert all(before[2] == after[1] for before, after in pairwise(phases))
    assert finished.began <= phases[0][1] and phases[-1][2] == stats.finished <= finished.ended
    timings = stats.timings()
    assert sum(duration for _, duration in timings.phases.values()) == timings.duration_ms
    assert timings.phases.keys() <= PHASE_NAMES.keys()
    for name, seconds in (("grammar_compile", script.grammar_s), ("adapter_load", script.adapter_s)):
        if seconds:
            assert timings.phases[name][1] == pytest.approx(seconds * 1000, abs=1)


async def test_phases_know_their_causes(start_gateway: StartGateway) -> None:
    script = FakeScript(
        answers=(("a", "b", "c"),),
        queue_s=0.05,
        prefill_s=0.01,
        grammar_s=0.02,
        adapter_s=0.01,
        causes=WaitCauses(queued_before=3, limit="rows", adapter_tier="host", compile_s=0.15),
        cached_tokens=1,
    )
    gateway = await start_gateway(script)
    body = {"model": BASE_MODEL, "messages": MESSAGES, "response_format": SCHEMA}
    assert (await gateway.post("/v1/chat/completions", body)).status_code == 200
    (stats,) = gateway.recorder.timings
    causes = stats.timings().causes
    assert causes["queue"] == {"before": 3, "limit": "rows"} and causes["adapter_load"] == {"tier": "host"}
    assert causes["grammar_compile"] == {"compile_ms": 150}
    assert causes["prefill"] == {"computed": stats.prompt_tokens - 1, "cached": 1}
    assert causes.keys() == {*WAITS, "admission", "prefill"}
