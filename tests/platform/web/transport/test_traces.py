"""Traces as a collector receives them over HTTP: one span per request, its phases below it, and nothing that a client wrote."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes
from tests.platform.web.gateway import BASE_MODEL, Gateway, StartGateway
from tests.platform.web.otlp_receiver import Received, ReceivedSpan, receiving

from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.engine.messages import WaitCauses
from loraplex.platform.observability.tracing import RequestTraces

CONTENT = "kanarienvogel9d1e"
TIMED = FakeScript(
    answers=((CONTENT, " two"),),
    token_interval_s=0.01,
    cached_tokens=2,
    queue_s=0.5,
    prefill_s=0.05,
    grammar_s=0.2,
    adapter_s=0.1,
)
CONVENTIONS = (gen_ai_attributes, http_attributes, error_attributes)
DEPRECATED = {"gen_ai.system", "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string"}}}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": CONTENT}]
    return {"model": BASE_MODEL, "messages": messages, "max_tokens": 8, "temperature": 0.5, **fields}


class Traced:
    """A gateway whose traces a receiver gets."""

    def __init__(self, collector: Received, start: StartGateway) -> None:
        self.collector = collector
        self._start = start
        self._traces = RequestTraces(f"{collector.url}/", "1.2.3")
        self.gateway: Gateway

    async def open(self, script: FakeScript) -> Gateway:
        self.gateway = await self._start(script, observers=[self._traces.record])
        return self.gateway

    async def flushed(self) -> Received:
        await asyncio.to_thread(self._traces.close)
        return self.collector

    async def only(self) -> ReceivedSpan:
        """The only span that is no child of another."""
        found = (await self.flushed()).spans
        own = {span.span for span in found}
        (root,) = [span for span in found if span.parent not in own]
        return root


@pytest.fixture
def traced(start_gateway: StartGateway) -> Iterator[Traced]:
    with receiving() as collector:
        yield Traced(collector, start_gateway)


async def test_a_request_is_a_span_with_its_phases_below_it(traced: Traced) -> None:
    gateway = await traced.open(TIMED)
    answer = await gateway.post(
        "/v1/chat/completions",
        chat(response_format=SCHEMA),
        **{"x-request-id": "mine", "traceparent": CALLER},
    )
    root, collector = await traced.only(), traced.collector
    assert collector.paths == ["/v1/traces"]
    assert collector.resources[0]["service.name"] == "loraplex"
    assert (root.trace, root.parent) == tuple(CALLER.split("-")[1:3])
    assert (root.name, root.kind, root.failed) == (f"chat {BASE_MODEL}", 2, False)
    usage = answer.json()["usage"]
    tenant_id = root.attributes.pop("loraplex.tenant.id")
    assert len(tenant_id) == 36
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "loraplex.request.id": "mine",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "loraplex",
        "gen_ai.request.model": BASE_MODEL,
        "gen_ai.response.model": BASE_MODEL,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 2,
    }
    phases = collector.children(root)
    assert set(phases) - {"adapter_fetch", "journal"} == {
        *("auth", "body", "prepare", "quota", "schema_check", "transport", "grammar_compile", "adapter_load"),
        *("queue", "prefill", "delivery", "decode", "finish", "settlement"),
    }
    assert all(phase.trace == root.trace for phase in phases.values())
    assert root.began <= phases["auth"].began < phases["auth"].ended <= phases["quota"].began
    millisecond = 1_000_000
    assert round((phases["queue"].ended - phases["queue"].began) / millisecond) == 200
    assert round((phases["grammar_compile"].ended - phases["grammar_compile"].began) / millisecond) == 200
    assert abs(phases["prefill"].began - phases["queue"].ended) < millisecond
    assert phases["decode"].began < phases["decode"].ended <= root.ended


async def test_spans_have_the_conventions_attributes(traced: Traced) -> None:
    """Of every operation, and with a phase's causes under names of our own."""
    script = msgspec.structs.replace(TIMED, causes=WaitCauses(queued_before=3, limit="rows"))
    gateway = await traced.open(script)
    await gateway.post("/v1/chat/completions", chat(response_format=SCHEMA))
    await gateway.post("/v1/completions", {"model": BASE_MODEL, "prompt": "x", "max_tokens": 2})
    await gateway.post("/v1/responses", {"model": BASE_MODEL, "input": "x"})
    await gateway.post("/v1/messages", {**chat(), "top_k": 3})
    await gateway.post("/v1/chat/completions", chat(model="missing"))
    collector = await traced.flushed()
    known = {name for module in CONVENTIONS for name in vars(module).values() if isinstance(name, str)}
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    for span in collector.spans:
        names = {name for name in span.attributes if not name.startswith("loraplex.")}
        assert names <= known - DEPRECATED
        assert span.attributes.get("gen_ai.operation.name", "chat") in operations
    first = next(span for span in collector.spans if span.attributes.get("http.response.status_code") == 200)
    phases = {name: span.attributes for name, span in collector.children(first).items()}
    every = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "loraplex",
        "gen_ai.request.model": BASE_MODEL,
    }
    assert all(every.items() <= phase.items() for phase in phases.values())
    usage = {name: first.attributes[f"gen_ai.usage.{name}"] for name in ("input_tokens", "output_tokens")}
    assert phases["prefill"] == {
        **every,
        "gen_ai.usage.input_tokens": usage["input_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 2,
        "loraplex.prefill.computed": usage["input_tokens"] - 2,
        "loraplex.prefill.cached": 2,
    }
    assert phases["decode"]["gen_ai.usage.output_tokens"] == usage["output_tokens"] == 2
    assert phases["decode"]["gen_ai.response.finish_reasons"] == ["stop"]
    assert phases["queue"] == {**every, "loraplex.queue.before": 3, "loraplex.queue.limit": "rows"}


async def test_spans_have_no_content(traced: Traced) -> None:
    gateway = await traced.open(TIMED)
    for stream in (False, True):
        answer = await gateway.post(
            "/v1/chat/completions", chat(stream=stream, user=CONTENT, stop=["x" + CONTENT])
        )
        assert CONTENT in answer.text
    await gateway.post("/v1/chat/completions", chat(tools=CONTENT))
    await gateway.post(f"/v1/{CONTENT}", {}, **{"x-other": CONTENT, "baggage": f"a={CONTENT}"})
    collector = await traced.flushed()
    assert len([span for span in collector.spans if not span.parent]) == 4
    for body in collector.raw:
        assert CONTENT.encode() not in body and gateway.key.encode() not in body


async def test_failures_name_their_type(traced: Traced) -> None:
    gateway = await traced.open(FakeScript(faults=(Fault(kind="fail", after_tokens=2),)))
    await gateway.post("/v1/chat/completions", chat(model="no-such-model"))
    await gateway.post("/v1/chat/completions", chat())
    await gateway.post("/v1/chat/completions", chat(stream=True))
    collector = await traced.flushed()
    missing, failed, broken = (span for span in collector.spans if not span.parent)
    # The name of a span comes from a closed set: this is no model.
    assert (missing.name, missing.attributes["error.type"], missing.failed) == ("chat", "404", False)
    assert missing.attributes["gen_ai.request.model"] == "no-such-model"
    assert failed.failed and failed.attributes["error.type"] == str(
        failed.attributes["http.response.status_code"]
    )
    assert (broken.attributes["http.response.status_code"], broken.attributes["error.type"]) == (200, "error")
    assert "auth" in collector.children(missing)


async def test_other_planes_are_traced_by_their_routes(traced: Traced) -> None:
    gateway = await traced.open(FakeScript())
    await gateway.get("/v1/models/some-name", [("authorization", f"Bearer {gateway.key}")])
    await gateway.get("/tenant/v1/me", [("authorization", "Bearer wrong")])
    await gateway.get("/not/there", [])
    collector = await traced.flushed()
    roots = [span for span in collector.spans if not span.parent]
    assert [root.name for root in roots] == ["GET /v1/models/{name:path}", "GET /tenant/v1/me", "GET none"]
    assert [root.attributes["error.type"] for root in roots] == ["404", "401", "404"]
    assert "loraplex.tenant.id" not in roots[1].attributes
    assert set(collector.children(roots[1])) == {"auth"}


async def test_a_caller_may_leave_a_request_out_and_a_broken_header_starts_a_trace(traced: Traced) -> None:
    gateway = await traced.open(FakeScript())
    await gateway.post("/v1/chat/completions", chat(), traceparent=NOT_SAMPLED)
    await gateway.post("/v1/chat/completions", chat(), traceparent="00-zz-zz-01")
    root = await traced.only()
    assert root.parent == "" and root.trace != NOT_SAMPLED.split("-")[1]


async def test_an_absent_collector_delays_no_answer(start_gateway: StartGateway) -> None:
    traces = RequestTraces("http://127.0.0.1:9", "1.2.3")
    gateway = await start_gateway(FakeScript(), observers=[traces.record])
    answer = await gateway.post("/v1/chat/completions", chat())
    assert answer.status_code == 200
    await asyncio.to_thread(traces.close)
