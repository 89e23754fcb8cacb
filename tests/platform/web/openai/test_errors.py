"""The client's error classes for every kind of failure, before and after the first byte."""

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import openai
import pytest

from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.engine.errors import (
    AdapterQuarantined,
    EngineOverloaded,
    EngineUnavailable,
    QueueShareExceeded,
    RequestTimeout,
)
from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.parameters.json_object import BodyLimits
from loraplex.tenants.api_keys.key_format import generate_key
from loraplex.tenants.database import Database

MODEL = "demo/base"
USER: Any = [{"role": "user", "content": "hello"}]
ENDLESS = FakeScript(token_interval_s=0.005)


async def ask(gateway: Any, body: Any, **headers: str) -> httpx.Response:
    response: httpx.Response = await gateway.post("/v1/chat/completions", body, **headers)
    return response


class Client:
    """One ASGI client: it says one message and then nothing; without `takes_body` it reads the status and no more."""

    def __init__(self, gateway: Any, message: dict[str, Any], takes_body: bool = True) -> None:
        self._gateway, self._messages, self._takes_body = gateway, [message], takes_body
        self.status: int | None = None

    async def post(self) -> None:
        headers = [(b"authorization", f"Bearer {self._gateway.key}".encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await self._gateway.app({**scope, "query_string": b""}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop()

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        if "body" in message and not self._takes_body:
            await asyncio.Event().wait()


async def test_an_unknown_parameter_is_named(start_gateway: Any) -> None:
    gateway = await start_gateway()
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.client().chat.completions.create(model=MODEL, messages=USER, extra_body={"tempo": 1})
    assert (refused.value.code, refused.value.param) == ("unknown_parameter", "tempo")
    assert refused.value.type == "invalid_request_error"


async def test_a_bad_value_names_parameter_value_and_bounds(start_gateway: Any) -> None:
    gateway = await start_gateway()
    with pytest.raises(openai.BadRequestError, match=r"`temperature` is 2.5.*0\.\.2") as refused:
        await gateway.client().chat.completions.create(model=MODEL, messages=USER, temperature=2.5)
    assert refused.value.param == "temperature"


async def test_features_not_offered_are_refused_by_name(start_gateway: Any) -> None:
    gateway = await start_gateway()
    for name, value in (("thinking_token_budget", 5),):
        with pytest.raises(openai.BadRequestError) as refused:
            await gateway.client().chat.completions.create(
                model=MODEL, messages=USER, extra_body={name: value}
            )
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", name)


async def test_token_ids_outside_the_vocabulary_are_refused(start_gateway: Any) -> None:
    gateway = await start_gateway()
    create = gateway.client().completions.create
    for extra in ({"prompt": [32_000]}, {"prompt": "a", "logit_bias": {"32000": 1}}):
        with pytest.raises(openai.BadRequestError, match=r"0\.\.31999"):
            await create(model=MODEL, **extra)


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        (EngineOverloaded.code, 503, True),
        (QueueShareExceeded.code, 429, True),
        (EngineUnavailable.code, 503, True),
        (AdapterQuarantined.code, 503, True),
        (RequestTimeout.code, 504, False),
        ("invalid_request", 400, False),
        ("never heard of", 500, False),
    ],
)
async def test_engine_failures_before_the_first_byte(
    start_gateway: Any, code: str, status: int, retry: bool
) -> None:
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="fail", code=code, message="inner words"),)))
    for stream in (False, True):
        response = await ask(gateway, {"model": MODEL, "messages": USER, "stream": stream})
        assert response.status_code == status
        assert ("retry-after" in response.headers) == retry
        named = response.headers.get("x-loraplex-limit")
        assert named == ("waiting_sequences" if status == 429 else None)
        assert response.headers["x-request-id"]
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert ("inner words" in response.text) == (status != 500)
    assert [each.finish_reason for each in gateway.recorder.timings] == ["error", "error"]


async def test_a_failure_after_the_first_byte_is_an_error_event(start_gateway: Any) -> None:
    fault = Fault(kind="nan", after_tokens=2)
    gateway = await start_gateway(FakeScript(faults=(fault,)))
    response = await ask(gateway, {"model": MODEL, "messages": USER, "stream": True})
    assert response.status_code == 200
    *_, error, end = response.text.split("\n\n")
    assert end == "" and error.startswith("event: error\ndata: ")
    assert json.loads(error.removeprefix("event: error\ndata: "))["error"]["code"] == "non_finite_logits"
    assert "[DONE]" not in response.text
    with pytest.raises(openai.APIError):
        stream = await gateway.client().chat.completions.create(model=MODEL, messages=USER, stream=True)
        [chunk async for chunk in stream]


async def test_a_whole_answer_that_fails_midway_delivers_nothing(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="nan", after_tokens=2),)))
    with pytest.raises(openai.InternalServerError):
        await gateway.client().chat.completions.create(model=MODEL, messages=USER)


@pytest.mark.parametrize("stream", [False, True])
async def test_other_weights_than_resolved_deliver_nothing(start_gateway: Any, stream: bool) -> None:
    gateway = await start_gateway(FakeScript(answers=(("secret",),), digest="f" * 64))
    response = await ask(gateway, {"model": MODEL, "messages": USER, "stream": stream})
    assert response.status_code == 500 and response.json()["error"]["code"] == "adapter_mismatch"
    assert "secret" not in response.text and gateway.engine.running == 0


async def test_a_token_id_is_spelled_one_way_in_logit_bias(start_gateway: Any) -> None:
    gateway = await start_gateway()
    for key, status in (("7", 200), ("07", 400), ("0", 200), ("00", 400), ("-1", 400), ("²", 400)):
        body = {"model": MODEL, "messages": USER, "max_tokens": 1, "logit_bias": {key: 1}}
        assert (await ask(gateway, body)).status_code == status, key


async def test_bodies_that_are_no_object(start_gateway: Any) -> None:
    gateway = await start_gateway()
    for body in (b"", b"{", b"[]", b'{"model": NaN}', b'{"a": 1, "a": 2}', b"[" * 5000, b"\xff"):
        assert (await ask(gateway, body)).status_code == 400


async def test_a_body_over_the_limit_is_413_whether_declared_or_not(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(body=BodyLimits(max_bytes=1000)))

    async def pieces() -> Any:
        for _ in range(3):
            yield b"x" * 500

    assert (await ask(gateway, b"x" * 1001)).status_code == 413
    async with httpx.AsyncClient(base_url=gateway.url, verify=False) as client:
        headers = {"authorization": f"Bearer {gateway.key}"}
        response = await client.post("/v1/completions", content=pieces(), headers=headers)
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"


async def test_a_body_that_does_not_arrive_is_408(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(body=BodyLimits(body_s=0.05)))
    client = Client(gateway, {"type": "http.request", "body": b"{", "more_body": True})
    await asyncio.wait_for(client.post(), 60)
    assert client.status == 408


async def test_a_tenant_whose_bodies_fill_its_share_gets_429_and_others_are_served(
    start_gateway: Any,
) -> None:
    limits = ServingConfig(body=BodyLimits(max_bytes=2000), max_buffered_body_bytes=8000)
    gateway = await start_gateway(limits=limits)
    part = {"type": "http.request", "body": b" " * 1990, "more_body": True}
    slow = Client(gateway, part)
    reading = asyncio.create_task(slow.post())
    body = {"model": MODEL, "messages": USER, "max_tokens": 1}
    async with asyncio.timeout(60):
        while (refused := await ask(gateway, body)).status_code == 200:
            await asyncio.sleep(0.01)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    other = await gateway.tenant("other")
    assert (await ask(gateway, body, authorization=f"Bearer {other}")).status_code == 200
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert (await ask(gateway, body)).status_code == 200


async def test_a_body_leaves_its_share_when_the_engine_has_its_request(start_gateway: Any) -> None:
    limits = ServingConfig(body=BodyLimits(max_bytes=2000), max_buffered_body_bytes=8000)
    gateway = await start_gateway(ENDLESS, limits)
    body = {"model": MODEL, "messages": USER, "max_tokens": 4000, "metadata": {"a": "b" * 400}}
    slow = []
    async with asyncio.timeout(60):
        for stream in (False, True) * 3:
            slow.append(asyncio.create_task(ask(gateway, {**body, "stream": stream})))
            while gateway.engine.running < len(slow):
                await asyncio.sleep(0.01)
    assert (await ask(gateway, {**body, "max_tokens": 1})).status_code == 200
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_client_that_leaves_within_its_body_is_no_server_error(start_gateway: Any) -> None:
    client = Client(await start_gateway(), {"type": "http.disconnect"})
    await client.post()
    assert client.status == 499


async def test_a_client_that_reads_nothing_loses_its_place(start_gateway: Any) -> None:
    gateway = await start_gateway(ENDLESS, ServingConfig(max_in_flight=1, reader_stall_s=0.5))
    body = {"model": MODEL, "messages": USER, "max_tokens": 4000, "stream": True}
    client = Client(gateway, {"type": "http.request", "body": json.dumps(body).encode()}, takes_body=False)
    await asyncio.wait_for(client.post(), 60)
    assert client.status == 200 and gateway.engine.running == 0
    assert (await ask(gateway, {"model": MODEL, "messages": USER, "max_tokens": 1})).status_code == 200


async def test_an_adapter_whose_files_are_lost_is_503(start_gateway: Any, tmp_path: Path) -> None:
    blobs = BlobStore(LocalAdapterStore(tmp_path), None, "b" * 64)

    async def adapter_path(tenant: UUID, digest: str) -> str:
        return str(await blobs.ensure_local(tenant, digest))

    gateway = await start_gateway(adapter_path=adapter_path)
    await gateway.adapter("acme", "pirate", "a" * 64)
    response = await ask(gateway, {"model": "pirate", "messages": USER})
    assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "adapter_unavailable"
    assert str(tmp_path) not in response.text and gateway.engine.requests == []


async def test_log_probabilities_count_towards_the_size_of_an_answer(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(max_logprobs=100))
    body = {"model": MODEL, "messages": USER, "max_tokens": 10, "logprobs": True}
    refused = await ask(gateway, {**body, "top_logprobs": 10})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
    assert "is 110, but must be at most 100" in refused.json()["error"]["message"]
    assert (await ask(gateway, {**body, "top_logprobs": 9})).status_code == 200


async def test_a_full_gateway_refuses_and_recovers(start_gateway: Any) -> None:
    gateway = await start_gateway(ENDLESS, ServingConfig(max_in_flight=4))
    body = {"model": MODEL, "messages": USER, "max_tokens": 200}
    first = [asyncio.create_task(ask(gateway, body)) for _ in range(2)]
    async with asyncio.timeout(60):
        while gateway.engine.running < 2:
            await asyncio.sleep(0.005)
    refused = await ask(gateway, body)
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-loraplex-limit"] == "sequences"
    assert refused.headers["x-loraplex-limit-level"] == "tenant"
    assert [response.status_code for response in await asyncio.gather(*first)] == [200, 200]
    assert (await ask(gateway, body)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before_start", [False, True])
async def test_a_client_that_leaves_aborts_its_request(
    start_gateway: Any, stream: bool, before_start: bool
) -> None:
    delay = 30.0 if before_start else 0.0
    gateway = await start_gateway(
        FakeScript(token_interval_s=0.005, start_delay_s=delay), ServingConfig(max_in_flight=1)
    )
    body = {"model": MODEL, "messages": USER, "stream": stream, "max_tokens": 4000}
    leaving = asyncio.create_task(ask(gateway, body))
    while not gateway.engine.running:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    leaving.cancel()
    async with asyncio.timeout(60):
        while not gateway.recorder.timings:
            await asyncio.sleep(0.005)
    assert gateway.engine.running == 0 and gateway.engine.aborts == 1
    assert [each.finish_reason for each in gateway.recorder.timings] == ["abort"]


async def test_unknown_paths_and_methods_answer_in_the_same_shape(start_gateway: Any) -> None:
    gateway = await start_gateway()
    assert (await gateway.post("/v1/nothing", {})).json()["error"]["code"] == "not_found"
    assert (await gateway.post("/v1/models", {})).status_code == 405


async def test_a_hostile_request_id_is_replaced(start_gateway: Any) -> None:
    gateway = await start_gateway()
    for hostile in ("a b", "x" * 65, "a\tb", "a;b", "<b>"):
        response = await gateway.get("/v1/models", [("x-request-id", hostile)])
        assert response.status_code == 401 and len(response.headers["x-request-id"]) == 32


async def test_a_database_that_is_down_is_503_and_never_401(start_gateway: Any) -> None:
    database = Database("postgresql://nobody@127.0.0.1:9/none")
    gateway = await start_gateway(other=database)
    key = generate_key("live").plaintext
    response = await gateway.get("/v1/models", [("authorization", f"Bearer {key}")])
    assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    assert "127.0.0.1" not in response.text
    assert (await gateway.get("/v1/models", [("authorization", f"Bearer {key[:-1]}")])).status_code == 401
    await database.close()


async def test_what_nobody_foresaw_is_a_plain_500(start_gateway: Any) -> None:
    gateway = await start_gateway()

    async def broken() -> None:
        raise RuntimeError("inner words")

    gateway.app.add_api_route("/broken", broken)
    response = await gateway.get("/broken", [])
    assert response.status_code == 500 and "inner words" not in response.text
    assert response.json()["error"]["code"] == "internal_error" and response.headers["x-request-id"]
