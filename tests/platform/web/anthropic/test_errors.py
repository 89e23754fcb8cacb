"""Errors of every status have Anthropic's shape below `/v1/messages`, and of the models where its client asks."""

import json
from typing import Any

import httpx
import pytest
from tests.platform.web.anthropic.wire import ERROR, HELLO, MODEL, body, events_of, known

from loraplex.engine.errors import EngineOverloaded, NonFiniteLogits, QueueShareExceeded, RequestTimeout
from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.parameters.json_object import BodyLimits

VERSION = {"anthropic-version": "2023-06-01"}


def told(response: httpx.Response) -> tuple[int, str]:
    """Status and type of an error in Anthropic's shape."""
    document = response.json()
    assert set(document) == {"type", "error", "request_id"} and document["type"] == "error"
    assert document["error"]["message"] and set(document["error"]) == {"type", "message"}
    assert document["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    if response.status_code != 413:
        # The package's types lack `request_too_large`, which its API sends and its clients know by the status.
        known(ERROR.validate_json(response.content))
    return response.status_code, document["error"]["type"]


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (EngineOverloaded.code, (503, "overloaded_error")),
        (QueueShareExceeded.code, (429, "rate_limit_error")),
        (RequestTimeout.code, (504, "timeout_error")),
        (NonFiniteLogits.code, (500, "api_error")),
        ("nobody knows it", (500, "api_error")),
    ],
)
async def test_failures_of_the_engine(start_gateway: Any, code: str, wanted: tuple[int, str]) -> None:
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="fail", code=code),)))
    for stream in (False, True):
        response = await gateway.post("/v1/messages", body(stream=stream))
        assert told(response) == wanted


async def test_a_failure_after_the_first_byte_is_an_event(start_gateway: Any) -> None:
    gateway = await start_gateway(
        FakeScript(faults=(Fault(kind="fail", after_tokens=2, code=EngineOverloaded.code),))
    )
    response = await gateway.post("/v1/messages", body(stream=True), **{"x-request-id": "mine"})
    events = events_of(response.text)
    assert response.status_code == 200 and events[-1]["request_id"] == "mine"
    assert events[-1]["error"]["type"] == "overloaded_error" and events[-1]["error"]["message"]
    assert not any(event["type"] in ("message_delta", "message_stop") for event in events)


async def test_refusals_before_the_engine(start_gateway: Any) -> None:
    limits = ServingConfig(key_cache_s=0.0, body=BodyLimits(max_bytes=1000))
    gateway = await start_gateway(limits=limits)
    post = gateway.post
    narrow = {"authorization": f"Bearer {await gateway.tenant('narrow', ('usage:read',))}"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        given = body() if path == "/v1/messages" else {"model": MODEL, "messages": HELLO}
        assert told(await post(path, b"{")) == (400, "invalid_request_error")
        assert told(await post(path, {**given, "mood": 1})) == (400, "invalid_request_error")
        assert told(await post(path, {**given, "model": "nothing"})) == (404, "not_found_error")
        assert told(await post(path, {**given, "system": "a" * 1000})) == (413, "request_too_large")
        assert told(await post(path, given, authorization="Bearer lpx_wrong")) == (
            401,
            "authentication_error",
        )
        assert told(await post(path, given, **narrow)) == (403, "permission_error")
        compressed = await post(path, given, **{"content-encoding": "br"})
        assert told(compressed) == (415, "invalid_request_error")


async def test_paths_and_methods_that_do_not_exist(start_gateway: Any) -> None:
    gateway = await start_gateway()
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for method, path, wanted in (
            ("GET", "/v1/messages", (405, "invalid_request_error")),
            ("POST", "/v1/messages/batches", (404, "not_found_error")),
            ("GET", "/v1/messages/batches/x_1", (404, "not_found_error")),
        ):
            assert told(await client.request(method, path)) == wanted
        assert (await client.post("/v1/messagesx")).json()["error"]["code"] == "not_found"


async def test_errors_of_models_have_the_shape_that_the_client_asks_for(start_gateway: Any) -> None:
    gateway = await start_gateway()
    authorized = {"x-api-key": gateway.key}
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        assert told(await client.get("/v1/models", headers=VERSION)) == (401, "authentication_error")
        missing = await client.get("/v1/models/nothing", headers=VERSION | authorized)
        assert told(missing) == (404, "not_found_error")
        assert missing.headers["anthropic-version"] == "2023-06-01"
        other = await client.get("/v1/models/nothing", headers=authorized)
        assert other.json()["error"]["code"] == "model_not_found"
        found = await client.get("/v1/models", headers=VERSION | authorized)
        assert found.headers["anthropic-version"] == "2023-06-01" and "request-id" in found.headers


async def test_either_header_has_the_key_on_v1_alone(start_gateway: Any) -> None:
    gateway = await start_gateway()
    other = await gateway.tenant("other")
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for path, given in (
            ("/v1/messages", body()),
            ("/v1/chat/completions", {"model": MODEL, "messages": HELLO, "max_tokens": 1}),
            ("/v1/tokenize", {"model": MODEL, "prompt": "a"}),
        ):
            for key, authorization, status in (
                (gateway.key, None, 200),
                (gateway.key, gateway.key, 200),
                (gateway.key, "sk-ant-1", 200),
                ("sk-ant-1", gateway.key, 200),
                (gateway.key, other, 401),
                ("sk-ant-1", None, 401),
            ):
                headers = {"x-api-key": key}
                if authorization is not None:
                    headers["authorization"] = f"Bearer {authorization}"
                response = await client.post(path, content=json.dumps(given), headers=headers)
                assert response.status_code == status, (path, headers)
        assert (await client.get("/tenant/v1/me", headers={"x-api-key": gateway.key})).status_code == 401
