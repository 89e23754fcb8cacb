"""One request: its phases and what took the time, its cost exact, the median beside it; and the log of requests."""

from datetime import UTC, datetime
from typing import Any

import pytest
from tests.platform.web.observed_tenant import HOUR, observed_tenant

from loraplex.platform.web.usage import request_queries as requests
from loraplex.platform.web.usage.request_pages import main_sentence
from loraplex.tenants.database import Database
from loraplex.tenants.errors import RequestNotFound
from loraplex.tenants.ledger.request_log import RequestLog

NOW = datetime(2026, 11, 20, 14, 30, tzinfo=UTC)


async def test_a_request_with_its_phases_and_its_cost(database: Database) -> None:
    seen = observed_tenant(database.url, NOW)
    async with database.as_tenant(seen.id) as session:
        found = await requests.find(session, seen.id, "mine-1")
        assert await requests.find(session, seen.id, str(seen.slow)) == found
        assert (await requests.timeline(session, seen.id, "mine-1")).spans == found.phases
    assert found.met is not None and found.met.mode == "counted"
    assert [(each.level, each.name, each.left) for each in found.met.nearest_first] == [
        ("key", "budget_per_day", 401_877),
        ("tenant", "tokens_per_minute", 2050),
    ]
    request = found.request
    assert (request.id, request.adapter, request.version, request.key_name) == (seen.slow, "coral", 1, "k")
    assert (request.prompt_tokens, request.cached_tokens, request.completion_tokens) == (1384, 384, 66)
    assert [(line.token_class, line.tokens, line.price) for line in found.cost] == [
        ("uncached_prompt", 1000, 3_000_001),
        ("cached_prompt", 384, 1),
        ("completion", 66, 7_000_003),
    ]
    assert sum(line.amount_pico for line in found.cost) == request.amount_pico
    assert [phase.name for phase in found.phases] == ["adapter_load", "queue", "prefill", "decode"]
    assert [phase.reason is None for phase in found.phases] == [False, False, True, True]
    assert found.median_ttft_ms is not None and 350 < found.median_ttft_ms <= 500
    assert found.registered_digest is None, "no version is registered"


@pytest.mark.parametrize(
    ("phases", "tokens", "sentence"),
    [
        (
            {"grammar_compile": [0, 2], "decode": [2, 40_796]},
            513,
            "Most of the time went into “Decode”: 513 tokens at 79.7\u00a0ms each.",
        ),
        (
            {"prefill": [0, 1500, {"computed": 9000, "cached": 0}], "decode": [1500, 900]},
            9,
            "Most of the time went into “Prefill”, 1.50\u00a0s: 9,000 tokens computed, 0 cached.",
        ),
        (
            {"queue": [0, 3000, {"before": 2}], "decode": [3000, 900]},
            9,
            "Most of the time went into “Queue”, 3.00\u00a0s: 2 requests stood before it.",
        ),
        (
            {"delivery": [0, 3000]},
            1,
            "Most of the time went into “Delivery of the first token”, 3.00\u00a0s.",
        ),
        ({"decode": [0, 999]}, 9, None),
        ({"queue": [0, 990], "prefill": [990, 990], "decode": [1980, 990]}, 9, None),
        ({}, 0, None),
    ],
)
def test_the_sentence_is_of_what_took_the_time(
    phases: dict[str, Any], tokens: int, sentence: str | None
) -> None:
    assert main_sentence(requests.phases_of(phases), tokens) == sentence


async def test_a_request_without_phases_and_of_another_tenant(database: Database) -> None:
    seen, other = observed_tenant(database.url, NOW), observed_tenant(database.url, NOW)
    async with database.as_tenant(seen.id) as session:
        found = await requests.find(session, seen.id, str(seen.requests[0]))
        assert (found.phases, found.met) == ([], None)
        with pytest.raises(RequestNotFound):
            await requests.find(session, seen.id, str(other.slow))


async def test_the_log_is_read_page_by_page(database: Database) -> None:
    seen = observed_tenant(database.url, NOW)
    async with database.as_tenant(seen.id) as session:
        log = RequestLog(session, seen.id)
        first = await log.page(requests.Filters(), None, 2)
        rest = await log.page(requests.Filters(), first.more_after, 9)
        slow = await log.page(requests.Filters(slower_than_ms=1000), None, 9)
        late = await log.page(requests.Filters(start=NOW - HOUR, adapter="coral"), None, 9)
    newest = [each.id for each in (*first.requests, *rest.requests)]
    assert newest == sorted(seen.requests, reverse=True) and rest.more_after is None
    assert [each.id for each in slow.requests] == [each.id for each in late.requests] == [seen.slow]
