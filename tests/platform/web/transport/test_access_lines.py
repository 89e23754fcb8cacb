"""One access line per request, with ids and times and nothing that a client wrote."""

import asyncio
from typing import Any
from uuid import UUID

from structlog.testing import capture_logs
from tests.platform.engines.managed_engine import Managed
from tests.platform.web.gateway import BASE_MODEL, StartGateway
from tests.platform.web.transport.test_traces import CALLER, NOT_SAMPLED

from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.access_log import log_request
from loraplex.platform.observability.tracing import RequestTraces

CONTENT = "kanarienvogel5a7c"


def lines_of(logged: list[Any]) -> list[dict[str, Any]]:
    return [line for line in logged if line["event"] == "request"]


async def test_lines_of_inference_and_of_refusals(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(
        FakeScript(answers=((CONTENT, "b"),), queue_s=0.25), observers=[log_request]
    )
    body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": CONTENT}]}
    with capture_logs() as logged:
        for stream in (False, True):
            await gateway.post(
                "/v1/chat/completions", {**body, "stream": stream}, **{"x-request-id": f"mine-{stream}"}
            )
        await gateway.post("/v1/chat/completions", {**body, "model": CONTENT})
        await gateway.get(f"/v1/models/{CONTENT}?{CONTENT}", [("authorization", f"Bearer x{CONTENT}")])
        await gateway.get(f"/{CONTENT}", [])
    whole, streamed, missing, unknown, nowhere = lines_of(logged)
    codes = [line.get("code") for line in (whole, streamed, missing, unknown, nowhere)]
    assert codes == [None, None, "model_not_found", "invalid_api_key", "not_found"]
    assert (whole["request_id"], streamed["request_id"]) == ("mine-False", "mine-True")
    for line in (whole, streamed):
        tokens = {name: line[name] for name in ("prompt_tokens", "completion_tokens")}
        assert (
            line["log_level"] == "info" and tokens["completion_tokens"] == 2 and tokens["prompt_tokens"] > 0
        )
        assert (line["method"], line["handler"], line["status"]) == ("POST", "/v1/chat/completions", 200)
        assert (line["finish_reason"], line["queue_ms"]) == ("stop", 250.0)
        assert 0 < line["ttft_ms"] <= line["duration_ms"]
        UUID(line["tenant_id"])
    assert (missing["status"], missing["tenant_id"]) == (404, whole["tenant_id"]) and "ttft_ms" not in missing
    assert (unknown["status"], unknown["tenant_id"]) == (401, None)
    assert (nowhere["status"], nowhere["handler"]) == (404, "none")
    key_id = whole["key_id"]
    assert key_id in gateway.key
    assert (missing["key_id"], unknown.get("key_id"), whole.get("adapter_id")) == (key_id, None, None)
    assert CONTENT not in str(logged) and gateway.key not in str(logged)


async def test_lines_name_what_served_a_request(start_gateway: StartGateway) -> None:
    """The version of its adapter, the engine, and the trace where there is one."""
    traces = RequestTraces("http://127.0.0.1:9", "1.2.3")
    gateway = await start_gateway(
        observers=[traces.record, log_request], real_engine=EnginePool([Managed(FakeScript())])
    )
    await gateway.adapter("acme", CONTENT, "c" * 64)
    await gateway.adapter("acme", CONTENT, "d" * 64)
    body = {"model": CONTENT, "prompt": "hi", "max_tokens": 2}
    with capture_logs() as logged:
        await gateway.post("/v1/completions", body, traceparent=CALLER)
        await gateway.post("/v1/completions", {**body, "model": BASE_MODEL}, traceparent=NOT_SAMPLED)
    await asyncio.to_thread(traces.close)
    adapted, plain = lines_of(logged)
    UUID(adapted["adapter_id"])
    assert (adapted["adapter_version"], adapted["engine"]) == (2, "0")
    assert adapted["trace_id"] == CALLER.split("-")[1]
    assert not {"adapter_id", "adapter_version", "trace_id"} & plain.keys()
    assert CONTENT not in str(logged)


async def test_the_line_of_a_refused_request_has_the_code_of_its_answer(start_gateway: StartGateway) -> None:
    """On every plane, for what is raised and for paths and methods that do not exist."""
    gateway = await start_gateway(observers=[log_request])
    admin = [("authorization", f"Bearer {await gateway.tenant('bolt', ('tenant:admin',))}")]
    chat = "/v1/chat/completions"
    with capture_logs() as logged:
        answers = [
            await gateway.post(chat, {"model": BASE_MODEL, "colour": 1}),
            await gateway.post(chat, b"{"),
            await gateway.post("/v1/tokenize", {"model": BASE_MODEL}),
            await gateway.post("/tenant/v1/keys", {"name": "x"}),
            await gateway.get("/tenant/v1/adapters/none", admin),
            await gateway.get("/tenant/v1/requests/none", []),
            await gateway.get("/operator/v1/tenants", admin),
            await gateway.get(chat, []),
            await gateway.get("/operator/v1/none", admin),
        ]
    expected = [answer.json()["error"]["code"] for answer in answers]
    assert len(set(expected)) >= 7 and all(answer.status_code >= 400 for answer in answers)
    assert [line["code"] for line in lines_of(logged)] == expected


async def test_the_line_of_a_stream_that_ends_with_an_error_has_its_code(start_gateway: StartGateway) -> None:
    fault = Fault(kind="nan", after_tokens=2)
    gateway = await start_gateway(FakeScript(faults=(fault,)), observers=[log_request])
    body = {"model": BASE_MODEL, "prompt": "hi", "max_tokens": 5, "stream": True}
    with capture_logs() as logged:
        answer = await gateway.post("/v1/completions", body)
    assert answer.status_code == 200 and "non_finite_logits" in answer.text
    (line,) = lines_of(logged)
    assert (line["status"], line["code"], line["finish_reason"]) == (200, "non_finite_logits", "error")
