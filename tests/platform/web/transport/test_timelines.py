"""The timeline of a request has every phase that API.md names, on one clock that begins with the authentication."""

from itertools import pairwise

from tests.platform.web.gateway import BASE_MODEL, StartGateway

from loraplex.engine.fake_engine import FakeScript
from loraplex.engine.messages import WaitCauses
from loraplex.platform.web.usage.phase_reasons import WAITS

PHASES = (
    "auth",
    "admission",
    "schema_check",
    "grammar_compile",
    "adapter_load",
    "queue",
    "prefill",
    "decode",
)
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string"}}}


async def test_a_request_has_all_phases(start_gateway: StartGateway) -> None:
    script = FakeScript(
        answers=(("a", "b", "c"),),
        token_interval_s=0.02,
        queue_s=0.5,
        prefill_s=0.05,
        grammar_s=0.2,
        adapter_s=0.1,
        causes=WaitCauses(queued_before=3, limit="rows", adapter_tier="host", compile_s=0.15),
        cached_tokens=1,
    )
    gateway = await start_gateway(script)
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": BASE_MODEL, "messages": messages, "response_format": SCHEMA}
    assert (await gateway.post("/v1/chat/completions", body)).status_code == 200
    (stats,) = gateway.recorder.timings
    phases, causes = stats.timings().phases, stats.timings().causes
    assert causes["queue"] == {"before": 3, "limit": "rows"} and causes["adapter_load"] == {"tier": "host"}
    assert causes["grammar_compile"] == {"compile_ms": 150}
    assert causes["prefill"] == {"computed": stats.prompt_tokens - 1, "cached": 1}
    assert causes.keys() == {*WAITS, "admission", "prefill"}
    assert set(phases) == set(PHASES)
    assert phases["auth"][0] == 0
    starts = [phases[name][0] for name in PHASES]
    # The engine works from when the counters have admitted the request: the journal's part of the admission goes on beside it.
    assert all(before <= after for before, after in pairwise(starts[:-1]))
    durations = {name: phases[name][1] for name in ("grammar_compile", "adapter_load", "queue", "prefill")}
    assert durations == {"grammar_compile": 200, "adapter_load": 100, "queue": 200, "prefill": 50}
    assert phases["decode"][1] >= 20


async def test_a_request_without_a_schema_has_no_check_of_one(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(FakeScript())
    await gateway.post("/v1/completions", {"model": BASE_MODEL, "prompt": "hello", "max_tokens": 2})
    (stats,) = gateway.recorder.timings
    assert {"auth", "admission"} <= stats.timings().phases.keys()
    assert not {"schema_check", "grammar_compile", "adapter_load"} & stats.timings().phases.keys()
