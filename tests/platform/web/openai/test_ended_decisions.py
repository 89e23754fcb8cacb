"""Decisions that end before their answers: by a row that fails, a version that is stopped, a deadline or a client that left.

Invariant: all rows end with the request, what the engine had begun is charged once for each adapter, and no other request is touched.
"""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from tests.platform.conftest import build_tokenizer
from tests.platform.web.openai.test_decisions import CHOICE, DIGESTS, MODEL, PREDICATE, QUESTIONS, SCORE

from loraplex.engine.errors import AdapterQuarantined, RequestTimeout
from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.platform.inference import engine_streams, generation
from loraplex.platform.inference.decisions.pipeline import MAX_ROWS
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.ledger.usage_ledger import Ended

WAIT_S = 60.0
TOKENIZER = build_tokenizer()
TOKENIZER.add_tokens(["Yes", "No"])
MARK = TOKENIZER.convert_tokens_to_ids("~")
MARKED = PREDICATE | {"instructions": "Is it ~?"}
"""The one question whose rows have `MARK`."""
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 30}
STALLED = FakeScript(faults=(Fault(kind="stall", prompt_token=MARK),))


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    return TOKENIZER


def failing(code: str) -> FakeScript:
    return FakeScript(
        token_interval_s=0.005, faults=(Fault(kind="fail", code=code, message="it ended", prompt_token=MARK),)
    )


def body(*questions: Any, model: str = MODEL) -> dict[str, Any]:
    return {"model": model, "input": "Help! " * 20, "questions": [*questions]}


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def nothing_is_left(gateway: Any) -> None:
    admissions = gateway.admissions
    await until(lambda: len(admissions.settled) + len(admissions.cancelled) == len(admissions.asked))
    assert gateway.engine.running == 0


def used(gateway: Any) -> list[tuple[str | None, str, int, int]]:
    """Digest, outcome, tokens reserved and charged, of each settlement."""
    return [
        (asked.request.digest, usage.outcome, asked.request.prompt_tokens, usage.prompt_tokens)
        for asked, usage in gateway.admissions.settled
    ]


async def two_adapters(gateway: Any) -> None:
    for name, digest in zip(("triage", "mood"), DIGESTS, strict=True):
        await gateway.adapter("acme", name, digest)


async def test_a_row_that_is_not_finite_fails_its_request_alone(start_gateway: Any) -> None:
    fault = Fault(kind="nan", prompt_token=MARK)
    gateway = await start_gateway(FakeScript(token_interval_s=0.005, faults=(fault,)))
    decisions = [body(PREDICATE, MARKED, SCORE), body(*QUESTIONS), body(MARKED), body(*QUESTIONS * 30)]
    company = asyncio.create_task(gateway.post("/v1/chat/completions", CHAT))
    answers = await asyncio.gather(*(gateway.post("/v1/decisions", each) for each in decisions))
    assert [each.status_code for each in answers] == [500, 200, 500, 200]
    assert answers[0].json()["error"]["code"] == "non_finite_logits"
    assert (await company).status_code == 200
    await nothing_is_left(gateway)
    failed = [each for each in used(gateway) if each[1] == "failed"]
    assert len(failed) == 2 and all(charged < reserved for _, _, reserved, charged in failed)
    assert (
        sum(each[3] for each in used(gateway) if each[1] == "completed")
        == sum(each.json()["usage"].get("input_tokens", 0) for each in answers if each.status_code == 200)
        + (await company).json()["usage"]["prompt_tokens"]
    )


@pytest.mark.parametrize("first", [True, False])
async def test_a_version_that_is_quarantined_in_between_is_named(start_gateway: Any, first: bool) -> None:
    """While the row that begins its questions runs, or one behind it."""
    gateway = await start_gateway(failing(AdapterQuarantined.code))
    await two_adapters(gateway)
    mood = [MARKED | {"model": "mood"}, SCORE | {"model": "mood"}]
    response = await gateway.post(
        "/v1/decisions", body(CHOICE, *(mood if first else reversed(mood)), model="triage")
    )
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "adapter_quarantined")
    assert "`mood`" in error["message"] and response.headers["retry-after"]
    await nothing_is_left(gateway)
    # The other adapter may have answered before.
    assert {digest: outcome for digest, outcome, _, _ in used(gateway)}[DIGESTS[1]] == "failed"
    assert all(charged <= reserved for _, _, reserved, charged in used(gateway))


async def test_a_tenant_that_is_suspended_ends_all_rows(start_gateway: Any) -> None:
    gateway = await start_gateway(STALLED)
    await two_adapters(gateway)
    asking = asyncio.create_task(
        gateway.post("/v1/decisions", body(PREDICATE, MARKED, MARKED | {"model": "mood"}, model="triage"))
    )
    await until(lambda: gateway.engine.running == 2 and gateway.admissions.followed)
    gateway.admissions.on_ended(Ended(await tenant_of(gateway), policy_epoch=1_000))
    response = await asking
    assert (response.status_code, response.json()["error"]["code"]) == (403, "tenant_suspended")
    await nothing_is_left(gateway)
    assert {each[1] for each in used(gateway)} == {"revoked"}


async def tenant_of(gateway: Any) -> UUID:
    async with gateway.database.as_operator() as session:
        return (await TenantRepository(session).get("acme")).id


async def test_a_client_that_leaves_ends_all_rows(start_gateway: Any) -> None:
    """Those that run, and those that wait for places."""
    gateway = await start_gateway(STALLED)
    await two_adapters(gateway)
    others = [MARKED | {"model": "mood"}] * MAX_ROWS
    asking = asyncio.create_task(
        gateway.post(
            "/v1/decisions",
            body(PREDICATE, *[MARKED] * MAX_ROWS, PREDICATE | {"model": "mood"}, *others, model="triage"),
        )
    )
    await until(lambda: gateway.engine.running == MAX_ROWS and len(gateway.admissions.followed) == 2)
    submitted = len(gateway.engine.requests)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await nothing_is_left(gateway)
    assert len(gateway.engine.requests) == submitted < 2 * MAX_ROWS and gateway.engine.aborts == MAX_ROWS
    first = [each for each in gateway.engine.requests if MARK not in each.prompt_token_ids]
    assert sorted(used(gateway)) == [
        (digest, "aborted", reserved, len(row.prompt_token_ids))
        for (digest, _, reserved, _), row in zip(
            sorted(used(gateway)), sorted(first, key=lambda row: row.adapter.digest), strict=True
        )
    ]


async def test_a_deadline_ends_all_rows(start_gateway: Any) -> None:
    gateway = await start_gateway(failing(RequestTimeout.code))
    headers = {"x-request-timeout-seconds": "20"}
    response = await gateway.post("/v1/decisions", body(PREDICATE, MARKED, *QUESTIONS), **headers)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    await nothing_is_left(gateway)
    assert all(0 < row.total_timeout_s <= 20 for row in gateway.engine.requests)
    [(_, outcome, reserved, charged)] = used(gateway)
    assert outcome == "failed" and 0 < charged < reserved


async def test_charges_are_the_sum_of_the_answers(start_gateway: Any) -> None:
    """Of several adapters, labels and values, repeated prompts, and requests that were refused: what is reserved is charged."""
    gateway = await start_gateway(FakeScript(cached_tokens=32))
    await two_adapters(gateway)
    many = CHOICE | {"choices": [{"value": f"option {number}"} for number in range(255)]}
    asked = [
        body(*QUESTIONS),
        body(*QUESTIONS),
        body(*QUESTIONS, *(each | {"model": "mood"} for each in QUESTIONS), model="triage"),
        body(many, model="mood"),
        body(PREDICATE | {"model": "nobody"}),
        body(CHOICE | {"choices": []}),
    ]
    usages = [
        response.json()["usage"]
        for response in [await gateway.post("/v1/decisions", each) for each in asked]
        if response.status_code == 200
    ]
    assert len(usages) == 4 and len(gateway.admissions.settled) == 5 and not gateway.admissions.cancelled
    settled = [usage for _, usage in gateway.admissions.settled]
    assert sum(each["input_tokens"] for each in usages) == sum(each.prompt_tokens for each in settled)
    cached = [each["input_tokens_details"]["cached_tokens"] for each in usages]
    assert cached == [32, 32, 64, 32] and sum(cached) == sum(each.cached_tokens for each in settled)
    assert all(reserved == charged for _, _, reserved, charged in used(gateway))


async def test_a_hung_engine_holds_no_decision_that_is_stopped(start_gateway: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(generation, "STOP_S", 0.05)
    monkeypatch.setattr(engine_streams, "ABORT_S", 0.1)
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="hang", prompt_token=MARK),)))
    monkeypatch.setattr(gateway.engine, "abort", lambda request_id: asyncio.Event().wait())
    asked = asyncio.create_task(gateway.post("/v1/decisions", body(PREDICATE, MARKED)))
    await until(lambda: gateway.admissions.followed and gateway.engine.running)
    gateway.admissions.on_ended(Ended(await tenant_of(gateway), policy_epoch=1_000))
    async with asyncio.timeout(WAIT_S / 4):
        assert (await asked).status_code in {403, 503}
