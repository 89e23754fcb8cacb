"""`x-request-timeout-seconds`: it shortens the time that a request has, never lengthens it, and bad values are refused."""

import asyncio
from itertools import product
from typing import Any

import pytest

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.web.request_timeout import TIMEOUT_HEADER

BAD = ("", "soon", "0", "-1", "nan", "inf", "1e999", "1,5")
BODY: dict[str, Any] = {"model": "demo/base", "prompt": "hello", "max_tokens": 2}


async def test_a_client_shortens_the_time_of_its_request_and_never_lengthens_it(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(key_cache_s=0.0, total_timeout_s=100.0))
    for text in ("30", "12.5", "1e6"):
        response = await gateway.post("/v1/completions", BODY, **{TIMEOUT_HEADER: text})
        assert response.status_code == 200, response.text
    assert (await gateway.post("/v1/completions", BODY)).status_code == 200
    shorter, shortest, longer, without = (each.total_timeout_s for each in gateway.engine.requests)
    assert 0 < shorter < 30 and 0 < shortest < 12.5, "the time before the engine counts"
    assert (longer, without) == (100.0, 100.0)


def slow_down(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every admission take 0.3 s longer."""
    admit = gateway.admissions.admit

    async def admit_slowly(*arguments: Any) -> Any:
        await asyncio.sleep(0.3)
        return await admit(*arguments)

    monkeypatch.setattr(gateway.admissions, "admit", admit_slowly)


async def test_the_time_before_the_engine_counts(start_gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = await start_gateway(FakeScript())
    slow_down(gateway, monkeypatch)
    response = await gateway.post("/v1/completions", BODY, **{TIMEOUT_HEADER: "0.2"})
    assert response.status_code == 200, "the scripted engine knows no time limits"
    (request,) = gateway.engine.requests
    assert request.total_timeout_s < 0


async def test_the_time_before_the_engine_counts_for_the_first_token(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(limits=ServingConfig(key_cache_s=0.0, first_token_timeout_s=100.0))
    slow_down(gateway, monkeypatch)
    response = await gateway.post("/v1/completions", BODY, **{TIMEOUT_HEADER: "30"})
    assert response.status_code == 200, response.text
    (request,) = gateway.engine.requests
    assert 0 < request.first_token_timeout_s <= 99.7, "a client's header is about the total"


async def test_a_bad_time_is_refused_by_the_name_of_its_header(start_gateway: Any) -> None:
    gateway = await start_gateway()
    for path, text in product(("/v1/completions", "/v1/chat/completions"), BAD):
        response = await gateway.post(path, b"not read", **{TIMEOUT_HEADER: text})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", TIMEOUT_HEADER)
        assert TIMEOUT_HEADER in error["message"]


async def test_the_header_is_in_the_openapi_document(start_gateway: Any) -> None:
    gateway = await start_gateway()
    document = (await gateway.get("/openapi.json", [])).json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        (parameter,) = document["paths"][path]["post"]["parameters"]
        assert (parameter["name"], parameter["in"]) == (TIMEOUT_HEADER, "header")
