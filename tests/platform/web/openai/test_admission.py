"""Admission of a request: once its sizes are known; settled by the engine's usage; reported in headers."""

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

import httpx
import openai
import pytest
from sqlalchemy import text as sql

from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.grammar.errors import GrammarRefused
from loraplex.platform.inference.admission import RENEWALS
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.inference.prompting.chat_template import LengthCheck, PromptRenderer
from loraplex.platform.tenant_limiter import AT_ONCE
from loraplex.tenants.errors import (
    DatabaseUnavailable,
    PolicyStale,
    PriceMissing,
    QuotaExhausted,
    QuotaUnavailable,
    RateLimited,
)
from loraplex.tenants.quotas.reservation import SettledUsage
from loraplex.tenants.rate_state import Rate, RateState

MODEL = "demo/base"
DIGEST = "a" * 64
CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
LIMITED: Any = {"limit": "requests_per_minute", "level": "tenant", "limit_value": 60, "retry_after_s": 1.4}
SPENT: Any = {"limit": "tokens_per_day", "level": "adapter", "limit_value": 9, "retry_after_s": None}
UNTOLD: Any = {"limit": "tokens_per_day", "level": "key"}
UNTOLD_HEADERS = {
    "retry-after": "2",
    "x-loraplex-limit": "tokens_per_day",
    "x-loraplex-limit-level": "key",
}
RATE = RateState(requests=Rate(60, 59, 1.0), tokens=Rate(1000, 12, 0.03))
RATE_HEADERS = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-reset-requests": "1s",
    "x-ratelimit-limit-tokens": "1000",
    "x-ratelimit-remaining-tokens": "12",
    "x-ratelimit-reset-tokens": "30ms",
}


async def settled(gateway: Any, count: int = 1) -> SettledUsage:
    async with asyncio.timeout(60):
        while len(gateway.admissions.settled) < count:
            await asyncio.sleep(0.01)
    assert gateway.engine.running == 0
    usage: SettledUsage = gateway.admissions.settled[-1][1]
    return usage


def headers_among(response: httpx.Response, names: dict[str, str]) -> dict[str, str]:
    return {name: response.headers[name] for name in names if name in response.headers}


async def test_an_alias_is_asked_for_with_what_it_chose(start_gateway: Any) -> None:
    gateway = await start_gateway()
    await gateway.adapter("acme", "pirate", DIGEST)
    for model in ("pirate", "pirate:production", "pirate@1", MODEL):
        await gateway.post("/v1/completions", {"model": model, "prompt": "hello", "max_tokens": 1})
    asked = [(each.adapter_version, each.alias) for each in gateway.admissions.asked]
    assert asked == [(1, "production"), (1, "production"), (1, None), (None, None)]


async def test_the_most_it_may_use_is_asked_for_and_what_it_used_is_settled(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(cached_tokens=2))
    await gateway.adapter("acme", "pirate", DIGEST)
    body = {"model": "pirate", "prompt": [[3, 4, 5], [6, 7]], "n": 2, "max_tokens": 4}
    response = await gateway.post("/v1/completions", body, **{"x-request-id": "mine"})
    (asked,) = gateway.admissions.asked
    assert (asked.prompt_tokens, asked.completion_tokens, asked.request_id) == (5, 16, "mine")
    assert asked.sequences == 4
    assert (asked.id.version, asked.adapter_version, asked.digest) == (7, 1, DIGEST)
    async with gateway.database.as_operator() as session:
        assert asked.tenant_id == await session.scalar(sql("SELECT id FROM tenants WHERE name = 'acme'"))
    assert asked.adapter_id is not None
    ((admission, usage),) = gateway.admissions.settled
    assert admission.id == asked.id and gateway.admissions.cancelled == []
    expected = SettledUsage(outcome="completed", prompt_tokens=5, cached_tokens=4, completion_tokens=16)
    assert replace(usage, timings=None) == expected and usage.timings is not None
    assert response.json()["usage"]["completion_tokens"] == 16


async def test_tier_and_adapter_choose_the_price(start_gateway: Any) -> None:
    gateway = await start_gateway()
    await gateway.adapter("acme", "poet", DIGEST)
    for model in ("poet", MODEL):
        assert (await gateway.post("/v1/chat/completions", CHAT | {"model": model})).status_code == 200
    asked = [(request.tier, request.adapter_name) for request in gateway.admissions.asked]
    assert asked == [("standard", "poet"), ("standard", None)]


@pytest.mark.parametrize("stream", [False, True])
async def test_rates_are_on_the_answer(start_gateway: Any, stream: bool) -> None:
    gateway = await start_gateway()
    gateway.admissions.rate = RATE
    response = await gateway.post("/v1/chat/completions", CHAT | {"stream": stream})
    assert response.status_code == 200
    assert (
        headers_among(response, RATE_HEADERS) == RATE_HEADERS and "x-ratelimit-mode" not in response.headers
    )
    gateway.admissions.degraded = True
    response = await gateway.post("/v1/chat/completions", CHAT | {"stream": stream})
    assert response.headers["x-ratelimit-mode"] == "degraded"


async def test_an_answer_that_fails_after_admission_tells_the_rates_too(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="fail", code="engine_unavailable"),)))
    gateway.admissions.rate = RATE
    response = await gateway.post("/v1/chat/completions", CHAT)
    assert response.status_code == 503 and headers_among(response, RATE_HEADERS) == RATE_HEADERS
    usage = await settled(gateway)
    assert replace(usage, timings=None) == SettledUsage(outcome="failed")


@pytest.mark.parametrize(
    ("fault", "code"),
    [("overloaded", "overloaded"), ("queue_share_exceeded", "rate_limit_exceeded")],
)
async def test_what_a_full_engine_refuses_is_a_refusal_and_no_usage(
    start_gateway: Any, fault: str, code: str
) -> None:
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="fail", code=fault),)))
    for body in (CHAT, CHAT | {"stream": True}):
        response = await gateway.post("/v1/chat/completions", body)
        assert response.json()["error"]["code"] == code
    assert [each.code for each in gateway.admissions.refused] == [code, code]
    assert gateway.admissions.settled == [] and len(gateway.admissions.cancelled) == 2


async def test_a_failure_midway_is_settled_by_what_was_made(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="nan", after_tokens=3),)))
    assert (await gateway.post("/v1/chat/completions", CHAT)).status_code == 500
    usage = await settled(gateway)
    assert (usage.outcome, usage.completion_tokens) == ("failed", 3) and usage.prompt_tokens > 0


async def test_a_stream_that_fails_is_settled_before_its_last_byte(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="nan", after_tokens=2),)))
    settle, begun, written = gateway.admissions.settle, asyncio.Event(), asyncio.Event()

    async def settle_slowly(*arguments: Any) -> None:
        begun.set()
        await written.wait()
        await settle(*arguments)

    monkeypatch.setattr(gateway.admissions, "settle", settle_slowly)
    answering = asyncio.create_task(gateway.post("/v1/chat/completions", CHAT | {"stream": True}))
    async with asyncio.timeout(60):
        await begun.wait()
    await asyncio.sleep(0.05)
    assert not answering.done()
    written.set()
    response = await answering
    assert "event: error" in response.text
    assert len(gateway.admissions.settled) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_settled_by_what_the_engine_made(
    start_gateway: Any, stream: bool
) -> None:
    gateway = await start_gateway(FakeScript(token_interval_s=0.005))
    body = CHAT | {"max_tokens": 3000, "stream": stream}
    leaving = asyncio.create_task(gateway.post("/v1/chat/completions", body))
    async with asyncio.timeout(60):
        while (await gateway.engine.stats()).generation_tokens < 5:
            await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    usage = await settled(gateway)
    made = (await gateway.engine.stats()).generation_tokens
    assert (usage.outcome, usage.completion_tokens) == ("aborted", made)
    await asyncio.sleep(0.05)
    assert len(gateway.admissions.settled) == 1 and gateway.admissions.cancelled == []


@pytest.mark.parametrize(
    ("refusal", "status", "code", "headers"),
    [
        (RateLimited("slow down", **LIMITED), 429, "rate_limit_exceeded", {"retry-after": "2"}),
        (QuotaExhausted("spent", **SPENT), 429, "insufficient_quota", {"x-should-retry": "false"}),
        (QuotaUnavailable("no counters"), 503, "quota_unavailable", {"retry-after": "2"}),
        (QuotaUnavailable("which", **UNTOLD), 503, "quota_unavailable", UNTOLD_HEADERS),
        (
            PriceMissing("there is no price in EUR"),
            503,
            "price_missing",
            {"retry-after": "30", "x-should-retry": "false"},
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(
    start_gateway: Any, refusal: Exception, status: int, code: str, headers: dict[str, str], stream: bool
) -> None:
    gateway = await start_gateway()
    gateway.admissions.refusals = [refusal]
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}
    response = await gateway.post("/v1/chat/completions", CHAT | form | {"stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert headers_among(response, headers) == headers
    if status == 429:
        assert isinstance(refusal, RateLimited | QuotaExhausted)
        assert response.headers["x-loraplex-limit"] == refusal.limit
        assert response.headers["x-loraplex-limit-level"] == refusal.level
    # Nothing was done for it.
    assert gateway.compile_checks.checked == [] and gateway.engine.requests == []
    assert gateway.admissions.settled == gateway.admissions.cancelled == []
    assert [(each.code, each.adapter_id) for each in gateway.admissions.refused] == [(code, None)]


async def test_every_refusal_is_counted_once_and_nothing_that_the_ledger_has(start_gateway: Any) -> None:
    """Bad bodies, unknown models, refused schemas and repeated refusals, but neither answers nor failures of the engine."""
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="fail", after_tokens=2, times=1),)))
    await gateway.adapter("acme", "pirate", DIGEST)
    for body, code in (
        (CHAT | {"n": 0}, "invalid_value"),
        (CHAT | {"model": "missing"}, "model_not_found"),
        (CHAT | {"model": "pirate", "max_tokens": 60_000}, "context_length_exceeded"),
    ):
        response = await gateway.post("/v1/chat/completions", body)
        assert response.json()["error"]["code"] == code == gateway.admissions.refused[-1].code
    assert [each.adapter_id is None for each in gateway.admissions.refused] == [True, True, False]
    gateway.admissions.recent = RateLimited("slow down", **LIMITED, rate=RATE)
    assert (await gateway.post("/v1/chat/completions", CHAT)).status_code == 429
    gateway.admissions.recent = None
    assert len({(each.tenant_id, each.api_key_id) for each in gateway.admissions.refused}) == 1
    codes = ["invalid_value", "model_not_found", "context_length_exceeded", "rate_limit_exceeded"]
    assert [each.code for each in gateway.admissions.refused] == codes
    assert [(await gateway.post("/v1/chat/completions", CHAT)).status_code for _ in range(2)] == [500, 200]
    await settled(gateway, 2)
    assert len(gateway.admissions.refused) == len(codes)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_tells_the_rates(start_gateway: Any, stream: bool) -> None:
    gateway = await start_gateway()
    gateway.admissions.refusals = [RateLimited("slow down", **LIMITED, rate=RATE)]
    response = await gateway.post("/v1/chat/completions", CHAT | {"stream": stream})
    assert response.status_code == 429 and headers_among(response, RATE_HEADERS) == RATE_HEADERS
    assert "x-ratelimit-mode" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_what_never_passes_is_not_to_be_tried_again(start_gateway: Any, stream: bool) -> None:
    gateway = await start_gateway()
    gateway.admissions.refusals = [RateLimited("too large", **LIMITED | {"retry_after_s": None})]
    response = await gateway.post("/v1/chat/completions", CHAT | {"stream": stream})
    assert response.status_code == 429 and response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers


async def test_a_recent_refusal_is_repeated_before_the_body_is_parsed(start_gateway: Any) -> None:
    gateway = await start_gateway()
    gateway.admissions.recent = RateLimited("slow down", **LIMITED, rate=RATE)
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for content in (b"{", b" " * 200_000, json.dumps(CHAT).encode()):
            response = await client.post(
                "/v1/chat/completions", content=content, headers={"authorization": f"Bearer {gateway.key}"}
            )
            assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert headers_among(response, RATE_HEADERS) == RATE_HEADERS
            assert response.headers["x-loraplex-limit"] == LIMITED["limit"]
    assert gateway.admissions.asked == []


async def test_the_official_client_does_not_repeat_what_is_spent(start_gateway: Any) -> None:
    gateway = await start_gateway()
    client = gateway.client().with_options(max_retries=2)
    gateway.admissions.refusals = [QuotaExhausted("spent", **SPENT)] * 3
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(**CHAT)
    assert len(gateway.admissions.asked) == 1


async def test_a_refused_grammar_gives_the_admission_back(start_gateway: Any) -> None:
    gateway = await start_gateway(refused=GrammarRefused("no", param="response_format", pointer=""))
    form = {"structured_outputs": {"json": {"type": "object"}}}
    assert (await gateway.post("/v1/chat/completions", CHAT | form)).status_code == 400
    assert len(gateway.admissions.cancelled) == 1 and gateway.admissions.settled == []


async def test_sizes_are_checked_before_admission(start_gateway: Any) -> None:
    gateway = await start_gateway()
    assert (await gateway.post("/v1/chat/completions", CHAT | {"max_tokens": 10**6})).status_code == 400
    assert (await gateway.post("/v1/chat/completions", CHAT | {"model": "nobody"})).status_code == 404
    assert gateway.admissions.asked == []


async def test_a_stale_policy_is_read_again(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(key_cache_s=60))
    assert (await gateway.post("/v1/chat/completions", CHAT)).status_code == 200
    async with gateway.database.as_operator() as session:
        await session.execute(sql("UPDATE tenants SET weight = 7"))
    before = gateway.admissions.asked[-1].policy_epoch
    gateway.admissions.refusals = [PolicyStale("old")]
    assert (await gateway.post("/v1/chat/completions", CHAT)).status_code == 200
    stale, fresh = gateway.admissions.asked[-2:]
    assert stale.policy_epoch == before < fresh.policy_epoch
    assert stale.id != fresh.id and gateway.engine.requests[-1].weight == 7
    # A key that is made and one that is revoked change it again while the caller is authenticated.
    gateway.admissions.refusals = [PolicyStale("old")] * RENEWALS
    assert (await gateway.post("/v1/chat/completions", CHAT)).status_code == 200
    gateway.admissions.refusals = [PolicyStale("old")] * (RENEWALS + 1)
    response = await gateway.post("/v1/chat/completions", CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert gateway.admissions.refusals == []


async def test_a_client_that_leaves_while_it_is_admitted_gives_its_admission_back(start_gateway: Any) -> None:
    gateway = await start_gateway()
    asked, go_on = asyncio.Event(), asyncio.Event()
    admit = gateway.admissions.admit

    async def slow(request: Any, on_provisional: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await admit(request, on_provisional)

    gateway.admissions.admit = slow
    leaving = asyncio.create_task(gateway.post("/v1/chat/completions", CHAT))
    await asked.wait()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await asyncio.sleep(0.05)
    go_on.set()
    async with asyncio.timeout(60):
        while not gateway.admissions.cancelled:
            await asyncio.sleep(0.01)
    assert gateway.engine.requests == [] and gateway.admissions.settled == []


async def test_who_is_found_revoked_learns_nothing_of_the_model(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(key_cache_s=60))
    await gateway.adapter("acme", "pirate", DIGEST)
    body = CHAT | {"model": "pirate"}
    response = await gateway.post("/v1/chat/completions", body)
    assert response.headers["x-loraplex-adapter-digest"] == DIGEST
    async with gateway.database.as_operator() as session:
        await session.execute(sql("UPDATE api_keys SET revoked_at = now()"))
    gateway.admissions.refusals = [PolicyStale("old")]
    response = await gateway.post("/v1/chat/completions", body)
    assert response.status_code == 401 and not [name for name in response.headers if "adapter" in name]


async def test_large_prompts_of_one_tenant_take_turns(start_gateway: Any, monkeypatch: Any) -> None:
    gateway = await start_gateway()
    running, most, lock = 0, 0, threading.Lock()
    encode = PromptRenderer.text_ids

    def watched(
        renderer: PromptRenderer, text: str, check: LengthCheck | None, *, special: bool
    ) -> list[int]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        try:
            return encode(renderer, text, check, special=special)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(PromptRenderer, "text_ids", watched)
    body = {"model": MODEL, "prompt": "hello " * 2_000, "max_tokens": 10**6}
    responses = await asyncio.gather(*(gateway.post("/v1/completions", body) for _ in range(12)))
    assert {response.status_code for response in responses} == {400} and 1 <= most <= AT_ONCE


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_works_while_the_ledger_is_written_and_nothing_is_sent(
    start_gateway: Any, stream: bool
) -> None:
    gateway = await start_gateway()
    written = asyncio.Event()
    gateway.admissions.before_confirmation = written.wait
    answering = asyncio.create_task(gateway.post("/v1/chat/completions", CHAT | {"stream": stream}))
    async with asyncio.timeout(60):
        while (await gateway.engine.stats()).generation_tokens < 5:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not answering.done() and gateway.admissions.settled == []
    written.set()
    assert (await answering).status_code == 200
    assert (await settled(gateway)).completion_tokens == 5


@pytest.mark.parametrize(
    ("refusal", "status", "code", "headers"),
    [
        (QuotaExhausted("spent", **SPENT), 429, "insufficient_quota", {"x-loraplex-limit": "tokens_per_day"}),
        (QuotaUnavailable("no counters"), 503, "quota_unavailable", {"retry-after": "2"}),
        (DatabaseUnavailable("away"), 503, "store_unavailable", {"retry-after": "2"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_ledger_refuses_is_aborted_and_costs_nothing(
    start_gateway: Any, refusal: Exception, status: int, code: str, headers: dict[str, str], stream: bool
) -> None:
    gateway = await start_gateway(FakeScript(token_interval_s=0.005))

    async def refuse() -> None:
        async with asyncio.timeout(60):
            while gateway.engine.running == 0:
                await asyncio.sleep(0.001)
        raise refusal

    gateway.admissions.before_confirmation = refuse
    body = CHAT | {"max_tokens": 3000, "stream": stream}
    response = await gateway.post("/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert headers_among(response, headers) == headers
    assert gateway.engine.running == 0
    assert gateway.admissions.settled == gateway.admissions.cancelled == []


async def test_a_policy_that_the_ledger_finds_stale_is_read_again(start_gateway: Any) -> None:
    gateway = await start_gateway()
    refusals = [PolicyStale("old")]

    async def refuse() -> None:
        if refusals:
            raise refusals.pop()

    gateway.admissions.before_confirmation = refuse
    assert (await gateway.post("/v1/chat/completions", CHAT)).status_code == 200
    stale, fresh = gateway.admissions.asked
    assert stale.id != fresh.id and len(gateway.engine.requests) == 1
    ((admission, _),) = gateway.admissions.settled
    assert admission.id == fresh.id


async def test_a_client_that_leaves_while_the_ledger_is_written_is_settled(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(token_interval_s=0.005))
    written = asyncio.Event()
    gateway.admissions.before_confirmation = written.wait
    leaving = asyncio.create_task(gateway.post("/v1/chat/completions", CHAT | {"max_tokens": 3000}))
    async with asyncio.timeout(60):
        while (await gateway.engine.stats()).generation_tokens < 5:
            await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert gateway.admissions.settled == []
    written.set()
    usage = await settled(gateway)
    assert usage.outcome == "aborted" and usage.completion_tokens >= 5
    assert gateway.admissions.cancelled == []


async def test_a_split_alias_sends_a_user_the_same_way(start_gateway: Any, monkeypatch: Any) -> None:
    gateway = await start_gateway()
    await gateway.adapter("acme", "pirate", DIGEST)
    seen: list[str] = []

    def choose(adapter_id: UUID, alias: str, targets: Mapping[int, int], sticky: str) -> int:
        seen.append(sticky)
        return 1

    monkeypatch.setattr("loraplex.tenants.registry.resolution.choose_target", choose)
    await gateway.post("/v1/chat/completions", CHAT | {"model": "pirate", "user": "u-1"})
    await gateway.post("/v1/chat/completions", CHAT | {"model": "pirate"}, **{"x-request-id": "r-1"})
    assert seen == ["u-1", "r-1"]


async def test_an_unsatisfied_schema_is_billed(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=((json.dumps([1, 1]),),)))
    form = {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}
    assert (await gateway.post("/v1/chat/completions", CHAT | form)).status_code == 422
    usage = await settled(gateway)
    assert (usage.outcome, usage.completion_tokens) == ("completed", 1)
