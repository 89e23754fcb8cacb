"""A direct route answers, counts and logs as the same route of the framework does."""

import json
import re
from typing import Any

import httpx
import pytest
from tests.platform.web.gateway import BASE_MODEL, Gateway, StartGateway

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.observability.request_record import GENERATING, FinishedRequest
from loraplex.platform.parameters.json_object import BodyLimits
from loraplex.platform.web.anthropic import routes as anthropic
from loraplex.platform.web.openai import routes as openai
from loraplex.platform.web.openapi import Application
from loraplex.tenants.errors import RateLimited

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {
    "model": BASE_MODEL,
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "hi"}],
}
COMPLETED: dict[str, Any] = {"model": BASE_MODEL, "max_tokens": 3, "prompt": [5, 6]}
CHANGING = re.compile(rb'("(?:id|created)":) ?(?:"[^"]*"|[0-9]+)')
"""What differs between two responses to one request."""
REQUESTS: dict[str, tuple[str, object, dict[str, str]]] = {
    "chat": (CHAT, ASKED, {}),
    "completions": (COMPLETIONS, COMPLETED, {}),
    "stream": (CHAT, {**ASKED, "stream": True}, {}),
    "own request id": (CHAT, ASKED, {"x-request-id": "mine.1"}),
    "no key": (CHAT, ASKED, {"authorization": ""}),
    "no JSON": (CHAT, b"{", {}),
    "unknown parameter": (CHAT, {**ASKED, "colour": "red"}, {}),
    "unknown model": (COMPLETIONS, {**COMPLETED, "model": "none"}, {}),
    "too large": (CHAT, {**ASKED, "user": "a" * 4096}, {}),
    "bad timeout": (CHAT, ASKED, {"x-request-timeout-seconds": "-1"}),
    "query": (CHAT + "?a=b", ASKED, {}),
    "slash at the end": (CHAT + "/", ASKED, {}),
}


async def served_both_ways(
    gateway: Gateway, path: str, body: object, headers: dict[str, str]
) -> list[httpx.Response]:
    """Return the response of the direct route, then that of the framework's."""
    app = gateway.app
    assert isinstance(app, Application)
    direct, app.direct = app.direct, None
    by_framework = await gateway.post(path, body, **headers)
    app.direct = direct
    return [await gateway.post(path, body, **headers), by_framework]


def lasting(response: httpx.Response) -> tuple[int, list[tuple[str, str]], bytes]:
    """Status, headers and body without what differs between two responses to one request."""
    own = response.request.headers.get("x-request-id")
    headers = [
        (name, value)
        for name, value in response.headers.multi_items()
        if name != "date" and (name != "x-request-id" or own)
    ]
    return response.status_code, headers, CHANGING.sub(rb"\1", response.content)


@pytest.mark.parametrize("name", REQUESTS)
async def test_both_ways_give_the_same_response_and_the_same_record(
    start_gateway: StartGateway, name: str
) -> None:
    seen: list[FinishedRequest] = []
    limits = ServingConfig(key_cache_s=0.0, body=BodyLimits(max_bytes=2048))
    gateway = await start_gateway(limits=limits, observers=[seen.append])

    responses = await served_both_ways(gateway, *REQUESTS[name])

    assert lasting(responses[0]) == lasting(responses[1])
    assert all(re.fullmatch("[0-9a-zA-Z.]+", each.headers["x-request-id"]) for each in responses)
    records = [(each.handler, each.method, each.status, each.tenant_id) for each in seen]
    assert len(records) == 2
    assert records[0] == records[1]
    assert set(seen[0].record.phases) == set(seen[1].record.phases)


async def test_refused_and_failed_requests_are_the_same_both_ways(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(FakeScript())

    limit = RateLimited(
        "too many", limit="requests_per_minute", level="tenant", limit_value=5, retry_after_s=3.0
    )
    gateway.admissions.refusals = [limit, limit]
    refused = await served_both_ways(gateway, CHAT, ASKED, {})
    gateway.admissions.refusals = [RuntimeError("a defect"), RuntimeError("a defect")]
    failed = await served_both_ways(gateway, CHAT, ASKED, {})

    assert [each.status_code for each in (*refused, *failed)] == [429, 429, 500, 500]
    assert lasting(refused[0]) == lasting(refused[1])
    assert refused[0].headers["retry-after"] == "3"
    assert lasting(failed[0]) == lasting(failed[1])
    assert json.loads(failed[0].content)["error"]["code"] == "internal_error"


async def test_other_methods_are_the_frameworks(start_gateway: StartGateway) -> None:
    gateway = await start_gateway()

    response = await gateway.get(CHAT, [])

    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"


async def test_a_direct_route_passes_no_layer_of_the_framework(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway()

    async def fail(*_: object) -> None:
        raise AssertionError("the framework was asked")

    monkeypatch.setattr(gateway.app, "middleware_stack", fail)

    assert (await gateway.post(CHAT, ASKED)).status_code == 200


def test_what_is_counted_as_generating_is_what_is_served_directly_and_decisions() -> None:
    assert {*openai.DIRECT, *anthropic.DIRECT, "/v1/decisions"} == GENERATING
