"""What is refused before anything ran takes nothing: neither of a rate, nor of a day, a budget or the running sequences.

The limit is one request a minute, so what is not given back is seen by the next request.
"""

import asyncio
import gzip
import json
from typing import Any, Final

import httpx
import pytest
from tests.platform.web.limited_gateway import limited

from loraplex.engine.errors import EngineDraining, EngineLost, EngineLostTwice, GrammarFailed, RequestTimeout
from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.grammar.errors import GrammarError, GrammarRefused, GrammarTooCostly
from loraplex.platform.auth import failure_buckets
from loraplex.platform.auth.failure_buckets import BURST
from loraplex.platform.errors import ENGINE_TABLE, ERROR_TABLE
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.parameters.json_object import BodyLimits
from loraplex.tenants.database import Database

CHAT: Final[dict[str, Any]] = {
    "model": "demo/base",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 5,
}
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
LIMITS: Final = {
    "requests_per_minute": 1,
    "tokens_per_minute": 100_000,
    "concurrent_requests": 4,
    "tokens_per_day": 1_000_000,
    "budget_per_month": 1_000_000,
}
BEFORE_ADMISSION: Final[dict[str, tuple[int, Any]]] = {
    "invalid_value": (400, {**CHAT, "temperature": 9}),
    "missing_required_parameter": (400, {"model": "demo/base"}),
    "unknown_parameter": (400, {**CHAT, "no_such": 1}),
    "unsupported_parameter": (400, {**CHAT, "thinking_token_budget": 5}),
    "context_length_exceeded": (400, {**CHAT, "max_tokens": 900_000}),
    "invalid_json": (400, b"{"),
    "request_too_large": (413, b" " * 70_000),
    "model_not_found": (404, {**CHAT, "model": "nobody"}),
    "invalid_schema": (
        400,
        {**CHAT, "response_format": {**FORMAT, "json_schema": {"name": "x", "schema": {"type": 7}}}},
    ),
}
SMALL: Final = ServingConfig(body=BodyLimits(max_bytes=65_536))
GRAMMAR_ERRORS: Final = sorted(
    (cls for cls in ERROR_TABLE if issubclass(cls, GrammarRefused)), key=lambda cls: cls.__name__
)
# A deadline may be the client's own. A request whose engine is lost or drains goes to another one, and may lose that one, too.
RESUMED: Final = {EngineLost.code, EngineDraining.code}
ENGINE_CODES: Final = sorted(ENGINE_TABLE.keys() - RESUMED - {RequestTimeout.code})


async def send(gateway: Any, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(base_url=gateway.url, verify=False) as client:
        given = {"authorization": f"Bearer {gateway.key}", **headers}
        return await client.post("/v1/chat/completions", content=content, headers=given)


async def check_nothing_is_used(gateway: Any, http: httpx.AsyncClient) -> None:
    """Every limit of the tenant as if the refused requests had not been sent, and room for one request of a minute."""
    async with asyncio.timeout(30):
        while True:
            (tenant,) = (await http.get("quotas")).json()["data"]
            found = [tenant["limits"][name] for name in LIMITS]
            if not any(each["used"] or each["reserved"] for each in found):
                break
            await asyncio.sleep(0.02)
    gateway.compile_checks.error = None
    assert (await send(gateway, CHAT)).status_code == 200
    second = await send(gateway, CHAT)
    assert (second.status_code, second.headers["x-loraplex-limit"]) == (429, "requests_per_minute")


@pytest.mark.parametrize("code", BEFORE_ADMISSION)
async def test_refused_before_admission(
    start_gateway: Any, database: Database, valkey_url: str, code: str
) -> None:
    status, body = BEFORE_ADMISSION[code]
    async with limited(start_gateway, database, valkey_url, FakeScript(), SMALL, **LIMITS) as (gateway, http):
        for _ in range(3):
            refused = await send(gateway, body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        await check_nothing_is_used(gateway, http)


async def test_refused_encodings(start_gateway: Any, database: Database, valkey_url: str) -> None:
    async with limited(start_gateway, database, valkey_url, **LIMITS) as (gateway, http):
        packed = gzip.compress(json.dumps(CHAT).encode())
        assert (await send(gateway, packed, **{"content-encoding": "br"})).status_code == 415
        await check_nothing_is_used(gateway, http)


@pytest.mark.parametrize("kind", GRAMMAR_ERRORS, ids=lambda cls: cls.__name__)
async def test_a_schema_that_is_refused_after_admission(
    start_gateway: Any, database: Database, valkey_url: str, kind: type[GrammarError]
) -> None:
    async with limited(start_gateway, database, valkey_url, **LIMITS) as (gateway, http):
        gateway.compile_checks.error = kind("refused")
        for _ in range(3):
            refused = await send(gateway, {**CHAT, "response_format": FORMAT})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, ERROR_TABLE[kind].code)
        assert gateway.engine.requests == []
        await check_nothing_is_used(gateway, http)


@pytest.mark.parametrize("code", ENGINE_CODES)
async def test_refused_by_the_engine_before_it_computed(
    start_gateway: Any, database: Database, valkey_url: str, code: str
) -> None:
    raised = EngineLost.code if code == EngineLostTwice.code else code
    times = 4 if code == EngineLostTwice.code else 2
    script = FakeScript(faults=(Fault(kind="fail", code=raised, times=times),))
    async with limited(start_gateway, database, valkey_url, script, **LIMITS) as (gateway, http):
        for _ in range(2):
            refused = await send(gateway, CHAT)
            assert refused.status_code == ENGINE_TABLE[code].status
        await check_nothing_is_used(gateway, http)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="fail", code="engine_overloaded", after_tokens=1),
        Fault(kind="fail", code=RequestTimeout.code),
    ],
    ids=["after a token", "by a deadline"],
)
async def test_what_ran_or_timed_out_keeps_its_request(
    start_gateway: Any, database: Database, valkey_url: str, fault: Fault
) -> None:
    async with limited(start_gateway, database, valkey_url, FakeScript(faults=(fault,)), **LIMITS) as (
        gateway,
        _,
    ):
        assert (await send(gateway, CHAT)).status_code >= 500
        assert (await send(gateway, CHAT)).headers["x-loraplex-limit"] == "requests_per_minute"


async def test_a_client_that_leaves_keeps_its_request(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    script = FakeScript(start_delay_s=30)
    async with limited(start_gateway, database, valkey_url, script, **LIMITS) as (gateway, _):
        leaving = asyncio.create_task(send(gateway, CHAT))
        async with asyncio.timeout(30):
            while not gateway.engine.requests:
                await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert (await send(gateway, CHAT)).headers["x-loraplex-limit"] == "requests_per_minute"


@pytest.mark.parametrize("error", [GrammarTooCostly("slow"), None], ids=["check", "engine"])
async def test_failed_checks_of_a_tenant_are_bounded(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Without it, schemas that take a second to compile would cost no quota at all."""
    monkeypatch.setattr(failure_buckets, "REFILL_S", 3600.0)
    faults = (Fault(kind="fail", code=GrammarFailed.code, times=BURST),)
    gateway = await start_gateway(FakeScript(faults=faults))
    gateway.compile_checks.error = error
    structured = {**CHAT, "response_format": FORMAT}
    for _ in range(BURST):
        assert (await send(gateway, structured)).status_code == 400
    asked = len(gateway.admissions.asked)
    slowed = await send(gateway, structured)
    assert slowed.status_code == 429
    assert (slowed.json()["error"]["code"], slowed.headers["retry-after"]) == ("rate_limit_exceeded", "1")
    assert "60 schemas" in slowed.json()["error"]["message"]
    assert len(gateway.admissions.asked) == asked
    gateway.compile_checks.error = None
    gateway.engine.script = FakeScript()
    assert (await send(gateway, CHAT)).status_code == 200, "what has no schema goes on"
    gateway.key = await gateway.tenant("another")
    assert (await send(gateway, structured)).status_code == 200
