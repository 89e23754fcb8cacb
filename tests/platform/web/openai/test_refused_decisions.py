"""Decisions that are refused for one of several adapters: none is computed or charged, and no header tells of the others."""

from typing import Any

import pytest
from sqlalchemy import text as sql
from tests.platform.web.openai.test_decisions import (
    CHOICE,
    DIGESTS,
    PREDICATE,
    SCORE,
    chat_tokenizer,
    many,
)

from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.tenants.errors import LimitExceeded, PolicyStale, StoreUnavailable
from loraplex.tenants.registry.records import AdapterProfile

__all__ = ["chat_tokenizer"]
VALUES = AdapterProfile(decision={"read": "values"})


def body(*questions: Any, model: str = "triage") -> dict[str, Any]:
    return {"model": model, "input": "Help!", "questions": [*questions]}


@pytest.fixture
async def gateway(start_gateway: Any) -> Any:
    gateway = await start_gateway(limits=ServingConfig(key_cache_s=60))
    await gateway.adapter("acme", "triage", DIGESTS[0])
    await gateway.adapter("acme", "mood", DIGESTS[1], VALUES)
    return gateway


async def test_an_alias_that_moves_does_not_answer_for_a_pinned_version(gateway: Any) -> None:
    sent = body(PREDICATE, SCORE | {"model": "triage@1"})
    assert (await gateway.post("/v1/decisions", sent)).headers["x-loraplex-adapter"] == "triage@1"
    await gateway.adapter("acme", "triage", DIGESTS[1])
    gateway.admissions.refusals = [PolicyStale("old")]
    answered = await gateway.post("/v1/decisions", sent)
    assert answered.status_code == 200
    assert set(answered.headers["x-loraplex-adapter"].split(", ")) <= {"triage@1", "triage@2"}
    assert "triage@1" in answered.headers["x-loraplex-adapter"]


@pytest.mark.parametrize(
    ("question", "param"),
    [
        (CHOICE | {"instructions": "word " * 20_000}, "questions[1]"),
        (CHOICE, "questions[1]"),
    ],
)
async def test_a_question_of_one_adapter_refuses_all(
    gateway: Any, question: dict[str, Any], param: str
) -> None:
    """The second one's values, true and "true", are one text."""
    refused = await gateway.post("/v1/decisions", body(PREDICATE, question | {"model": "mood"}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert gateway.engine.requests == [] and gateway.admissions.settled == []


async def test_a_store_that_fails_for_one_adapter_refuses_all(gateway: Any) -> None:
    gateway.admissions.refusals = [StoreUnavailable("away")]
    refused = await gateway.post("/v1/decisions", body(PREDICATE, many(3) | {"model": "mood"}))
    assert refused.status_code == 503
    assert gateway.engine.requests == [] and gateway.admissions.settled == []


async def test_too_many_rows_of_one_adapter_are_refused(gateway: Any) -> None:
    refused = await gateway.post("/v1/decisions", body(*[many(255)] * 200))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "questions"), error
    assert "2048" in error["message"]


async def test_who_is_found_revoked_learns_nothing_of_the_adapters(gateway: Any) -> None:
    sent = body(PREDICATE, many(3) | {"model": "mood"})
    assert "mood@1" in (await gateway.post("/v1/decisions", sent)).headers["x-loraplex-adapter"]
    charged = len(gateway.admissions.settled)
    async with gateway.database.as_operator() as session:
        await session.execute(sql("UPDATE api_keys SET revoked_at = now()"))
    gateway.admissions.refusals = [PolicyStale("old")]
    refused = await gateway.post("/v1/decisions", sent)
    told = [name for name in refused.headers if "adapter" in name or "decision" in name]
    assert refused.status_code == 401 and told == [] and len(gateway.admissions.settled) == charged


async def test_more_adapters_than_may_run_at_once_are_refused_for_good(gateway: Any) -> None:
    refusal = LimitExceeded("full", limit="concurrent_requests", level="key", limit_value=1, retry_after_s=1)
    gateway.admissions.refusals = [refusal]
    refused = await gateway.post("/v1/decisions", body(PREDICATE, many(3) | {"model": "mood"}))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "questions"), error
    assert "at most 1" in error["message"] and gateway.admissions.settled == []
