"""Access to the inference plane: keys, scopes, adapters of one tenant only, and no route without a key."""

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from sqlalchemy import text
from starlette.routing import BaseRoute
from tests.tenants.suspension import resume, suspend

from loraplex.engine.fake_engine import FakeScript
from loraplex.grammar.errors import GrammarRefused
from loraplex.platform.auth import authenticator, failure_buckets
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.key_format import ParsedKey, generate_key
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import QuotaUnavailable, RateLimited

MODEL = "demo/base"
USER: Any = [{"role": "user", "content": "hello"}]
FIRST, SECOND = "a" * 64, "b" * 64
UNSATISFIED: Any = {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}
PUBLIC = {"/openapi.json", "/docs", "/docs/static/{name:path}"}


async def test_every_spelling_of_an_adapter(start_gateway: Any) -> None:
    gateway = await start_gateway()
    await gateway.adapter("acme", "pirate", FIRST)
    await gateway.adapter("acme", "pirate", SECOND)
    create = gateway.client().chat.completions.with_raw_response.create
    for name, version, digest in (
        ("pirate", 2, SECOND),
        ("pirate:production", 2, SECOND),
        ("pirate@1", 1, FIRST),
        ("pirate@2", 2, SECOND),
    ):
        response = await create(model=name, messages=USER, max_tokens=2)
        assert response.headers["x-loraplex-adapter"] == f"pirate@{version}"
        assert response.headers["x-loraplex-adapter-digest"] == digest
        reference = gateway.engine.requests[-1].adapter
        assert reference.digest == digest and reference.blob_path.endswith(f"/{digest}")
        assert reference.namespace == gateway.engine.requests[-1].namespace
        assert gateway.recorder.adapters[-1] == (digest, name), "metrics name an adapter as its requests do"


async def test_an_address_that_presents_too_many_forged_keys_is_429_and_valid_keys_go_on(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_buckets, "BURST", 3)
    # As if other forged keys took the only connection that is left to the address.
    monkeypatch.setattr(authenticator, "PENALIZED_AT_ONCE", 0)
    monkeypatch.setattr(authenticator, "PENALIZED_WAITING", 0)
    gateway = await start_gateway()
    assert (await gateway.get("/v1/models", headers_of(gateway.key))).status_code == 200
    forged = [await gateway.get("/v1/models", headers_of(generate_key("live").plaintext)) for _ in range(8)]
    assert {each.status_code for each in forged[:3]} == {401}
    assert forged[-1].status_code == 429 and forged[-1].headers["retry-after"] == "1"
    assert forged[-1].json()["error"]["code"] == "rate_limit_exceeded"
    for path in ("/v1/models", "/v1/models/demo/base"):
        assert (await gateway.get(path, headers_of(gateway.key))).status_code == 200


def headers_of(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


async def test_a_stream_names_its_adapter_before_its_first_chunk(start_gateway: Any) -> None:
    gateway = await start_gateway()
    await gateway.adapter("acme", "pirate", FIRST)
    create = gateway.client().chat.completions.with_raw_response.create
    response = await create(model="pirate", messages=USER, max_tokens=2, stream=True)
    assert response.headers["x-loraplex-adapter-digest"] == FIRST


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "more"),
    [
        (None, 400, {"max_tokens": 10**6}),
        (None, 422, UNSATISFIED),
        (RateLimited("no", limit="a", level="key", limit_value=1, retry_after_s=1), 429, {}),
        (QuotaUnavailable("which"), 503, {}),
        (GrammarRefused("no", param="response_format", pointer=""), 400, UNSATISFIED),
    ],
)
async def test_an_error_names_the_adapter_too(
    start_gateway: Any, refusal: Exception | None, status: int, more: dict[str, Any], stream: bool
) -> None:
    refused = refusal if isinstance(refusal, GrammarRefused) else None
    gateway = await start_gateway(FakeScript(answers=(("[1, 1]",),)), refused=refused)
    await gateway.adapter("acme", "pirate", FIRST)
    gateway.admissions.refusals = [refusal] if refusal is not None and refused is None else []
    body = {"model": "pirate", "messages": USER, "stream": stream} | more
    response = await gateway.post("/v1/chat/completions", body)
    # A stream has started when its value is validated.
    assert response.status_code == (200 if stream and status == 422 else status)
    assert response.headers["x-loraplex-adapter"] == "pirate@1"
    assert response.headers["x-loraplex-adapter-digest"] == FIRST
    assert ("x-loraplex-schema-enforcement" in response.headers) == (status == 422)


async def test_an_error_of_counting_tokens_names_the_adapter(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(max_prompt_characters=10_000))
    await gateway.adapter("acme", "pirate", FIRST)
    for prompt, status in (("short", 200), ("x" * 20_000, 400)):
        response = await gateway.post("/v1/tokenize", {"model": "pirate", "prompt": prompt})
        assert response.status_code == status
        assert response.headers["x-loraplex-adapter-digest"] == FIRST


async def test_the_base_model_has_no_adapter_headers(start_gateway: Any) -> None:
    gateway = await start_gateway()
    response = await gateway.client().chat.completions.with_raw_response.create(
        model=MODEL, messages=USER, max_tokens=2
    )
    assert "x-loraplex-adapter" not in response.headers


async def test_another_tenants_adapter_does_not_exist(start_gateway: Any) -> None:
    gateway = await start_gateway()
    await gateway.adapter("acme", "pirate", FIRST)
    other = gateway.client(await gateway.tenant("rival"))
    errors = []
    for name in ("pirate", "pirate:production", "pirate@1", "nobody"):
        with pytest.raises(openai.NotFoundError) as missing:
            await other.chat.completions.create(model=name, messages=USER)
        with pytest.raises(openai.NotFoundError):
            await other.models.retrieve(name)
        errors.append((missing.value.code, missing.value.param, str(missing.value.body).replace(name, "*")))
    assert len(set(errors)) == 1 and errors[0][:2] == ("model_not_found", "model")
    assert [model.id for model in (await other.models.list()).data] == [MODEL]
    assert gateway.engine.requests == []


async def test_two_tenants_same_adapter_name_and_weights_stay_apart(start_gateway: Any) -> None:
    gateway = await start_gateway()
    other = await gateway.tenant("rival")
    for tenant in ("acme", "rival"):
        await gateway.adapter(tenant, "pirate", FIRST)
    for key in (gateway.key, other):
        await gateway.client(key).chat.completions.create(model="pirate", messages=USER, max_tokens=1)
    first, second = gateway.engine.requests
    assert first.namespace != second.namespace
    assert first.adapter.key != second.adapter.key and first.adapter.blob_path != second.adapter.blob_path


async def test_names_that_mean_nothing_are_404(start_gateway: Any) -> None:
    gateway = await start_gateway()
    await gateway.adapter("acme", "pirate", FIRST)
    create = gateway.client().chat.completions.create
    for suffix in ("@9", "@0", "@", "@1:production", ":beta", ":", "/", " ", "\n", "ö", "' OR 1=1"):
        with pytest.raises(openai.NotFoundError):
            await create(model=f"pirate{suffix}", messages=USER)


async def test_models_lists_the_base_and_the_own_adapters(start_gateway: Any) -> None:
    gateway = await start_gateway()
    await gateway.adapter("acme", "pirate", FIRST)
    models = gateway.client().models
    assert [model.id for model in (await models.list()).data] == [MODEL, "pirate"]
    assert (await models.retrieve("pirate")).id == "pirate"
    assert (await models.retrieve(MODEL)).object == "model"


def paths(app: FastAPI) -> list[tuple[str, str]]:
    def walk(routes: list[BaseRoute]) -> list[tuple[str, str]]:
        found = []
        for route in routes:
            found += walk(getattr(route, "routes", None) or [])
            if isinstance(route, APIRoute):
                found += [(method, route.path) for method in route.methods or ()]
        return found

    described = [(method.upper(), path) for path, each in app.openapi()["paths"].items() for method in each]
    return sorted({*walk(list(app.routes)), *described})


async def status_of(gateway: Any, method: str, target: str, host: str) -> int:
    """The status of a request spelled byte by byte."""
    url = httpx.URL(gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\nConnection: close"
    writer.write(f"{head}\r\n\r\n{{}}".encode())
    response = await reader.read()
    writer.close()
    return int(response.split(b" ")[1])


async def test_no_route_answers_without_a_key_whatever_host_or_spelling(start_gateway: Any) -> None:
    gateway = await start_gateway()
    routes = [(method, path) for method, path in paths(gateway.app) if path not in PUBLIC]
    planned = {"/v1/chat/completions", "/v1/completions", "/v1/tokenize", "/v1/models", "/v1/models/{name}"}
    assert {path for _, path in routes} >= planned
    for method, path in routes:
        for host in ("", "localhost", "a/../openapi.json", "x#@/docs", "127.0.0.1/docs?"):
            # The server itself refuses some hosts with 400.
            assert await status_of(gateway, method, path, host) in (400, 401), (method, path, host)
        for spelled in (f"/{path}", path.replace("/v1", "/v1/."), path.replace("v", "%76"), f"{path}?/docs"):
            assert await status_of(gateway, method, spelled, "localhost") in (401, 404, 405), spelled


async def test_wrong_keys_are_401_with_one_message(start_gateway: Any) -> None:
    gateway = await start_gateway()
    key, other = gateway.key, await gateway.tenant("rival")
    missing = await gateway.get("/v1/models", [])
    assert missing.json()["error"]["code"] == "invalid_api_key"
    for value in (
        f"Bearer {key[:-50]}{'x' * 43}{key[-7:]}",
        f"Bearer {key[:-6]}{other[-6:]}",
        f"Bearer {key[:-1]}",
        f"Bearer {key.lower()}",
        f"Basic {key}",
        "Bearer",
        key,
    ):
        response = await gateway.get("/v1/models", [("authorization", value)])
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert response.json() == missing.json(), value
    with pytest.raises(openai.AuthenticationError):
        await gateway.client("nonsense").models.list()


async def test_a_wrong_secret_with_a_right_checksum_is_401(start_gateway: Any) -> None:
    gateway = await start_gateway()
    _, environment, key_id, _, _ = gateway.key.split("_")
    forged = ParsedKey(environment, key_id, "0" * 43).plaintext
    unknown = ParsedKey(environment, "0" * 16, "0" * 43).plaintext
    for key in (forged, unknown):
        assert (await gateway.get("/v1/models", [("authorization", f"Bearer {key}")])).status_code == 401


async def test_two_authorization_headers_are_refused(start_gateway: Any) -> None:
    gateway = await start_gateway()
    headers = [("authorization", f"Bearer {gateway.key}"), ("authorization", "Bearer x")]
    assert (await gateway.get("/v1/models", headers)).status_code == 401


async def test_revoked_expired_and_suspended(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    key = f"Bearer {gateway.key}"
    assert (await gateway.get("/v1/models", [("authorization", key)])).status_code == 200
    async with database.as_operator() as session:
        await suspend(session, "acme")
    suspended = await gateway.get("/v1/models", [("authorization", key)])
    assert (suspended.status_code, suspended.json()["error"]["code"]) == (403, "tenant_suspended")
    async with database.as_operator() as session:
        tenant = await resume(session, "acme")
        keys = KeyRepository(session)
        await keys.revoke(tenant.id, gateway.key.split("_")[2])
        soon = await keys.create(
            tenant.id, "soon", ["inference"], expires_at=datetime.now(UTC) + timedelta(hours=1)
        )
    assert (await gateway.get("/v1/models", [("authorization", key)])).status_code == 401
    assert (
        await gateway.get("/v1/models", [("authorization", f"Bearer {soon.plaintext}")])
    ).status_code == 200
    async with database.as_operator() as session:
        await session.execute(text("UPDATE api_keys SET expires_at = now() WHERE name = 'soon'"))
    assert (
        await gateway.get("/v1/models", [("authorization", f"Bearer {soon.plaintext}")])
    ).status_code == 401


async def test_scopes(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    narrow = await gateway.tenant("narrow", ("usage:read",))
    admin = await gateway.tenant("admin", ("tenant:admin",))
    async with database.as_operator() as session:
        operator = (await KeyRepository(session).create(None, "op", ["operator"])).plaintext
    for key in (narrow, operator):
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await gateway.client(key).models.list()
        assert refused.value.code == "insufficient_scope"
    assert (await gateway.client(admin).models.list()).data


async def test_a_hot_key_is_looked_up_once_and_its_end_is_seen(
    start_gateway: Any, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    with_clock = partial(authenticator.Authenticator, clock=lambda: now[0])
    monkeypatch.setattr("loraplex.platform.web.app.Authenticator", with_clock)
    gateway = await start_gateway(FakeScript(), ServingConfig(key_cache_s=2.0))
    create = gateway.client().chat.completions.create
    await create(model=MODEL, messages=USER, max_tokens=1)
    async with database.as_operator() as session:
        tenant = await TenantRepository(session).get("acme")
        await KeyRepository(session).revoke(tenant.id, gateway.key.split("_")[2])
    await create(model=MODEL, messages=USER, max_tokens=1)
    now[0] = 2.1
    with pytest.raises(openai.AuthenticationError):
        await create(model=MODEL, messages=USER, max_tokens=1)


async def test_a_revoked_key_is_refused_at_once_where_nothing_is_admitted(
    start_gateway: Any, database: Database
) -> None:
    gateway = await start_gateway(limits=ServingConfig(key_cache_s=60.0))
    key = [("authorization", f"Bearer {gateway.key}")]
    completion = {"model": MODEL, "messages": USER, "max_tokens": 1}
    tokenizing = {"model": MODEL, "prompt": "hello"}
    for path, body in (("chat/completions", completion), ("tokenize", tokenizing)):
        assert (await gateway.post(f"/v1/{path}", body)).status_code == 200
    async with database.as_operator() as session:
        tenant = await TenantRepository(session).get("acme")
        await KeyRepository(session).revoke(tenant.id, gateway.key.split("_")[2])
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/v1/models/nobody"):
        assert (await gateway.get(path, key)).status_code == 401, path
    for path, wrong in (
        ("tokenize", tokenizing),
        ("chat/completions", {**completion, "model": "nobody"}),
        ("chat/completions", {**completion, "temperature": 9}),
        ("chat/completions", {**completion, "max_tokens": 100_000, "stream": True}),
        ("chat/completions", b"{"),
        ("completions", {"model": "nobody", "prompt": "hello"}),
    ):
        response = await gateway.post(f"/v1/{path}", wrong)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key"), wrong


async def test_a_wrong_request_with_a_good_key_learns_what_is_wrong(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(key_cache_s=60.0))
    for wrong, status in (({"model": "nobody"}, 404), ({"temperature": 9}, 400)):
        body = {"model": MODEL, "messages": USER, **wrong}
        assert (await gateway.post("/v1/chat/completions", body)).status_code == status


async def test_a_tenant_tokenizes_so_much_at_once_and_others_beside_it(start_gateway: Any) -> None:
    gateway = await start_gateway(
        limits=ServingConfig(key_cache_s=0.0, max_tokenizing=3, max_tokenizing_per_tenant=2)
    )
    rival, third = [f"Bearer {await gateway.tenant(name)}" for name in ("rival", "third")]
    body = {"model": MODEL, "prompt": "many words of a long text " * 8_000}
    responses = await asyncio.gather(
        *(gateway.post("/v1/tokenize", body) for _ in range(6)),
        *(gateway.post("/v1/tokenize", body, authorization=key) for key in (rival, rival, third)),
    )
    statuses = [response.status_code for response in responses]
    assert {200, 429} <= set(statuses) <= {200, 429, 503} and statuses.count(200) >= 3
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.headers["x-loraplex-limit-level"] == "tenant" and refused.headers["retry-after"] == "1"
    assert (await gateway.post("/v1/tokenize", body)).status_code == 200
