"""One request: its phases and largest wait, its cost exact, the median beside it; and the log of requests."""

from datetime import UTC, datetime

import pytest
from tests.platform.web.observed_tenant import HOUR, observed_tenant

from loraplex.platform.web.usage import request_queries as requests
from loraplex.tenants.database import Database
from loraplex.tenants.errors import RequestNotFound

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
    assert found.largest_wait is not None and found.largest_wait.name == "queue"
    assert found.median_ttft_ms is not None and 350 < found.median_ttft_ms <= 500
    assert found.registered_digest is None, "no version is registered"


async def test_a_request_without_phases_and_of_another_tenant(database: Database) -> None:
    seen, other = observed_tenant(database.url, NOW), observed_tenant(database.url, NOW)
    async with database.as_tenant(seen.id) as session:
        found = await requests.find(session, seen.id, str(seen.requests[0]))
        assert (found.phases, found.met, found.largest_wait) == ([], None, None)
        with pytest.raises(RequestNotFound):
            await requests.find(session, seen.id, str(other.slow))


async def test_the_log_is_read_page_by_page(database: Database) -> None:
    seen = observed_tenant(database.url, NOW)
    async with database.as_tenant(seen.id) as session:
        first = await requests.page(session, seen.id, requests.Filters(), None, limit=2)
        rest = await requests.page(session, seen.id, requests.Filters(), first.older, limit=9)
        oldest, newer = rest.requests[-1].id, [each.id for each in (*first.requests, *rest.requests)][-3:-1]
        back = await requests.page(session, seen.id, requests.Filters(), None, oldest, limit=2)
        top = await requests.page(session, seen.id, requests.Filters(), None, newer[0], limit=9)
        slow = await requests.page(session, seen.id, requests.Filters(slower_than_ms=1000), None)
        late = await requests.page(
            session, seen.id, requests.Filters(start=NOW - HOUR, adapter="coral"), None
        )
    newest = [each.id for each in (*first.requests, *rest.requests)]
    assert [each.id for each in back.requests] == newer and (back.older, back.newer) == (newer[1], newer[0])
    assert [each.id for each in top.requests] == newest[:2] and top.newer is None
    assert newest == sorted(seen.requests, reverse=True) and rest.older is None
    assert [each.id for each in slow.requests] == [each.id for each in late.requests] == [seen.slow]
