"""Decisions of a live server equal `transformers` with PEFT, in float32; what else runs changes no bit of them, and they of nothing."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
from openai.types.decision import Decision
from tests.end_to_end.decision_reference import (
    INPUTS,
    QUESTIONS,
    Reference,
    answers_of,
    check_equal,
    decide,
)
from tests.end_to_end.live_server import LiveServer, until

BLOCK: Final = 16
"""Tokens of a block of the cache."""
SHORT: Final = slice(2)
"""Inputs that are tried with the demo's model without `--long`."""


@pytest.fixture(scope="module", params=["base", 0, 1, 2])
def served(request: pytest.FixtureRequest, demo: LiveServer, demo_model: Path) -> tuple[Any, str, Reference]:
    """(client, name of the model, the same model in `transformers`): the base model, and the adapter of each demo tenant."""
    if request.param == "base":
        return demo.client(), demo.access.model, Reference(demo_model, None)
    owner = demo.access.tenants[request.param]
    client, name = demo.client(request.param), owner.adapters[0]
    raw = decide(client, name, "a", QUESTIONS[:1])
    (folder,) = (demo.data_dir / "adapters").glob(f"*/{raw.headers['x-loraplex-adapter-digest']}")
    return client, name, Reference(demo_model, folder)


@pytest.mark.parametrize(
    "part", [SHORT, *(pytest.param(slice(at, at + 50), marks=pytest.mark.long) for at in range(0, 200, 50))]
)
def test_answers_equal_brute_force(served: tuple[Any, str, Reference], part: slice) -> None:
    client, name, reference = served
    for given in INPUTS[part]:
        check_equal(reference, given, decide(client, name, given, QUESTIONS))


def test_company_changes_no_bit(demo: LiveServer) -> None:
    """Alone, together, beside other requests, and with all of it in the cache."""
    client, owner = demo.client(), demo.access.tenants[0]
    asked = [each | {"model": name} for each in QUESTIONS for name in (demo.access.model, owner.adapters[0])]
    given = INPUTS[-1]
    alone = [answers_of(decide(client, demo.access.model, given, [each]))[0] for each in asked]
    with ThreadPoolExecutor() as threads:
        others = [
            threads.submit(decide, client, demo.access.model, other, QUESTIONS * 5) for other in INPUTS[:4]
        ]
        together = [threads.submit(decide, client, demo.access.model, given, asked * 2) for _ in range(3)]
        assert all(each.result().status_code == 200 for each in others)
        for each in together:
            assert answers_of(each.result()) == alone * 2


def test_streams_beside_decisions_write_the_same(demo: LiveServer) -> None:
    client: Any = demo.client()
    model = demo.access.model

    def text(number: int) -> str:
        messages = [{"role": "user", "content": INPUTS[number]}]
        chunks = client.chat.completions.create(
            model=model, messages=messages, max_tokens=12, temperature=1, seed=number, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    before = [text(number) for number in range(4)]
    with ThreadPoolExecutor() as threads:
        decided = [threads.submit(decide, client, model, each, QUESTIONS * 3) for each in INPUTS[4:8]]
        assert [each.result() for each in [threads.submit(text, number) for number in range(4)]] == before
        assert all(each.result().status_code == 200 for each in decided)


def test_usage_tells_what_the_cache_had_before(demo: LiveServer) -> None:
    """All full blocks of the input, and of the block that a question shares with it what is the input's."""
    client = demo.client()
    asked = QUESTIONS + [each | {"model": demo.access.tenants[0].adapters[0]} for each in QUESTIONS]
    first, second = (
        json.loads(decide(client, demo.access.model, INPUTS[9] * 4, asked).text)["usage"] for _ in "12"
    )
    assert first["input_tokens"] == second["input_tokens"]
    details = [each["input_tokens_details"] for each in (first, second)]
    written, before, cached = (
        details[0]["cache_write_tokens"],
        *(each["cached_tokens"] for each in details),
    )
    assert written > 0 and 0 <= cached - before - written < 2 * BLOCK
    assert details[1]["cache_write_tokens"] == 0


def test_ledger_quotas_and_usage_are_the_sum_of_the_answers(demo: LiveServer) -> None:
    """Of two adapters and the base model, a repeated input, and requests that are refused."""
    owner, day = demo.access.tenants[0], {"tokens_per_day": 1_000_000}
    headers = {"authorization": f"Bearer {owner.admin_key}"}
    with httpx.Client(base_url=f"{demo.url}/tenant/v1", headers=headers, timeout=60) as tenant:
        key = tenant.post("keys", json={"name": "decisions", "scopes": ["inference"]}).json()
        place = f"keys/{key['id']}/quotas"
        match = {"if-match": tenant.get(place).headers["etag"]}
        tenant.put(place, json=day, headers=match).raise_for_status()
        client = demo.client(key=key["api_key"])
        others = [each | {"model": owner.adapters[0]} for each in QUESTIONS]
        asked = [QUESTIONS, [*QUESTIONS, *others], [*others, *QUESTIONS[:1]], others]
        answers = [json.loads(decide(client, demo.access.model, INPUTS[8] * 3, each).text) for each in asked]
        for refused in ([], [QUESTIONS[0] | {"model": "nobody"}]):
            with pytest.raises(openai.APIStatusError):
                decide(client, demo.access.model, INPUTS[8], refused)

        def requests() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = tenant.get("requests", params={"limit": 50}).json()["data"]
            return [each for each in found if each["key_id"] == key["id"] and each["outcome"] == "completed"]

        until(lambda: len(requests()) == 6, 60, "one row for each adapter of each request")
        total = sum(each["usage"]["input_tokens"] for each in answers)
        cached = sum(each["usage"]["input_tokens_details"]["cached_tokens"] for each in answers)
        assert sum(each["prompt_tokens"] for each in requests()) == total
        assert sum(each["cached_tokens"] for each in requests()) == cached > 0
        assert {each["completion_tokens"] for each in requests()} == {0}
        now = datetime.now(UTC)
        span = {"from": (now - timedelta(days=1)).isoformat(), "to": (now + timedelta(days=1)).isoformat()}

        def used() -> int:
            rows = tenant.get("usage", params=span | {"bucket": "1mo", "group_by": "key"}).json()["data"]
            return sum(each["prompt_tokens"] for each in rows if each["key_id"] == key["id"])

        until(lambda: used() == total, 60, "the usage is that of the answers")
        levels = tenant.get("quotas", params={"limit": 100}).json()["data"]
        [mine] = [each for each in levels if each["level"] == "key" and each["name"] == key["id"]]
        assert (mine["limits"]["tokens_per_day"] | {"resets_at": None}) == {
            "limit": 1_000_000,
            "used": total,
            "reserved": 0,
            "resets_at": None,
        }


def test_the_official_client_reads_its_own_types(demo: LiveServer) -> None:
    """`openai` as it is, sync and async; nothing of an answer is unknown to its types."""
    given: dict[str, Any] = {"model": demo.access.model, "input": INPUTS[0], "questions": QUESTIONS}

    async def asynchronously() -> Decision:
        key = demo.access.tenants[0].api_key
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key=key, max_retries=0) as client:
            answer: Decision = await client.decisions.create(**given)
            return answer

    answers = [demo.client().decisions.create(**given), asyncio.run(asynchronously())]
    for each in answers:
        Decision.model_validate(each.model_dump(), strict=True)
        assert [answer.type for answer in each.answers] == [question["type"] for question in QUESTIONS]
        assert each.answers[0].name == "urgent" and each.model_extra == {}
    assert answers[0].answers == answers[1].answers
