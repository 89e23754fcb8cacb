"""One access line per request, with ids and times and nothing that a client wrote."""

from typing import Any
from uuid import UUID

from structlog.testing import capture_logs
from tests.platform.api.conftest import BASE_MODEL, StartGateway

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.observability.access_log import log_request

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
    assert CONTENT not in str(logged) and gateway.key not in str(logged)
