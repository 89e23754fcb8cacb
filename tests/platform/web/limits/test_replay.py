"""A draft is replayed over the rows of its subject alone, within bounds of rows and of time."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest
from tests.platform.web.observed_tenant import HOUR, ObservedTenant, observed_tenant
from tests.tenants.ledger.stored_usage import Used, settle

from loraplex.platform.web.limits import queries as limits
from loraplex.platform.web.limits import replay as limit_replay
from loraplex.platform.web.limits.replay import Draft, ReplayedDraft
from loraplex.tenants.database import Database
from loraplex.tenants.errors import AdapterNotFound, ReplayTooSlow
from loraplex.tenants.ledger import usage_steps

NOW = datetime(2026, 11, 20, 14, 30, tzinfo=UTC)
START = datetime(2026, 11, 14, tzinfo=UTC)


async def replayed(
    database: Database, seen: ObservedTenant, draft: Draft, level: str = "tenant", name: str = ""
) -> ReplayedDraft:
    async with database.as_tenant(seen.id) as session:
        found = await limits.named(session, seen.id, level, name)
        return await limit_replay.replay(session, seen.id, found.state.subject, draft, NOW)


async def test_a_draft_of_each_level(database: Database) -> None:
    seen, _ = observed_tenant(database.url, NOW), observed_tenant(database.url, NOW)
    found = await replayed(database, seen, Draft(tokens_per_day=100, requests_per_minute=2))
    assert (found.since, found.is_whole, found.requests, found.refused) == (START, True, 5, 2)
    assert found.first == NOW - 2 * HOUR
    assert [(each.name, each.refused) for each in found.limits] == [
        ("requests_per_minute", 1),
        ("tokens_per_day", 1),
    ]
    of_adapter = await replayed(database, seen, Draft(tokens_per_day=1449), "adapter", "coral")
    assert (of_adapter.requests, of_adapter.refused, of_adapter.first) == (1, 1, NOW)
    of_key = await replayed(database, seen, Draft(requests_per_minute=0), "key", list(seen.tenant.keys)[1])
    assert (of_key.requests, of_key.refused, of_key.first) == (0, 0, None)
    with pytest.raises(AdapterNotFound):
        await replayed(database, seen, Draft(), "adapter", "none")


async def test_a_month_begins_with_what_was_used_before_the_days(database: Database) -> None:
    seen = observed_tenant(database.url, NOW)
    key = seen.tenant.keys[seen.key_id]
    earlier = Used(None, key, START - HOUR, uncached=500)
    last_month = replace(earlier, at=START - timedelta(days=20))
    settle(database.url, seen.tenant, [earlier, last_month, replace(earlier, at=START)])
    whole = 3 * 20 + 14 + 1450 + 2 * 510
    enough = await replayed(database, seen, Draft(tokens_per_month=whole))
    assert (enough.requests, enough.refused) == (6, 0)
    assert (await replayed(database, seen, Draft(tokens_per_month=whole - 1))).refused == 1
    of_key = await replayed(database, seen, Draft(tokens_per_month=509), "key", seen.key_id)
    assert of_key.refused == of_key.requests


MINTED = """
    WITH made AS (
        INSERT INTO api_keys (id, tenant_id, key_id, environment, name, secret_sha256, scopes, parent_id)
        SELECT %(id)s, tenant_id, 'minted', environment, name, secret_sha256, scopes, id FROM api_keys WHERE id = %(second)s
    ) UPDATE api_keys SET parent_id = %(first)s WHERE id = %(second)s
"""
LIMITED = (
    "INSERT INTO quotas (id, tenant_id, api_key_id, tokens_per_day) VALUES (gen_random_uuid(), %s, %s, 9)"
)


async def test_a_keys_limit_is_replayed_over_all_that_it_would_bind(database: Database) -> None:
    """Before it has a limit, too; and over its own requests alone once another key binds it."""
    seen, minted = observed_tenant(database.url, NOW), uuid4()
    (first, second), (name, below) = seen.tenant.keys.values(), seen.tenant.keys
    used = [Used(None, each, at, uncached=500) for each in (second, minted) for at in (NOW, START - HOUR)]
    with psycopg.connect(database.url) as connection:
        connection.execute(MINTED, {"id": minted, "first": first, "second": second})
    settle(database.url, seen.tenant, used)

    async def count(draft: Draft) -> list[tuple[int, int]]:
        found = [await replayed(database, seen, draft, "key", each) for each in (name, below)]
        return [(each.requests, each.refused) for each in found]

    month = Draft(tokens_per_month=2500)
    assert await count(month) == [(7, 2), (2, 0)]
    with psycopg.connect(database.url) as connection:
        connection.execute(LIMITED, [seen.id, first])
    assert await count(month) == [(7, 2), (1, 0)]


async def test_requests_that_ran_together_are_crowded(database: Database) -> None:
    seen = observed_tenant(database.url, NOW)
    one = Used(None, seen.tenant.keys[seen.key_id], NOW - 3 * HOUR, duration_ms=60_000)
    starts = (0, 30, 59, 61, 200)
    settle(database.url, seen.tenant, [replace(one, at=one.at + timedelta(seconds=each)) for each in starts])
    found = await replayed(database, seen, Draft(concurrent_requests=2))
    assert found.first == one.at + timedelta(seconds=50), "the third came 59 seconds after the first"
    assert found.refused == 3, "the third, the fourth, and an hour later one of three at once"
    assert (await replayed(database, seen, Draft(concurrent_requests=3))).refused == 0


async def test_it_is_bounded_in_rows_and_in_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observed_tenant(database.url, NOW)
    monkeypatch.setattr(usage_steps, "MAX_ROWS", 2)
    cut = await replayed(database, seen, Draft(tokens_per_day=5))
    assert (cut.is_whole, cut.requests, cut.since) == (False, 2, NOW - HOUR)
    monkeypatch.setattr(usage_steps, "MAX_MILLISECONDS", 20)
    monkeypatch.setattr(usage_steps, "_OF", {"tenant": "AND pg_sleep(5) IS NOT NULL"})
    with pytest.raises(ReplayTooSlow):
        await replayed(database, seen, Draft(tokens_per_day=5))
