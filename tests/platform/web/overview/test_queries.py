"""The overview: a range beside the one before, the month's spend, and what needs a person."""

from datetime import UTC, datetime, timedelta

import psycopg
from tests.platform.web.observed_tenant import HOUR, observed_tenant
from tests.tenants.ledger.stored_usage import Used, make_tenant, settle
from tests.tenants.ledger.test_request_reports import fail, refuse

from loraplex.platform.web.overview import queries as overview
from loraplex.tenants.database import Database
from loraplex.tenants.models import NO_ID

NOW = datetime(2026, 11, 20, 14, 30, tzinfo=UTC)
AMOUNT = 10 * 3_000_001 + 4 + 6 * 7_000_003


async def test_a_range_beside_the_one_before(database: Database) -> None:
    seen = observed_tenant(database.url, NOW)
    refuse(database.url, seen.tenant, NOW.replace(minute=0) - 30 * HOUR, "model_not_found", 7)
    fail(database.url, seen.tenant, NOW - HOUR, "model_not_found")
    fail(database.url, seen.tenant, NOW - 30 * HOUR, "invalid_value")
    async with database.as_tenant(seen.id) as session:
        found = await overview.requests(session, seen.id, "24h", NOW)
    assert (found.start, found.end) == (NOW.replace(minute=0) - 23 * HOUR, NOW.replace(minute=0) + HOUR)
    assert (found.current.requests, found.current.errors, found.current.limited) == (9, 5, 4)
    assert (found.previous.requests, found.previous.errors) == (7, 7)
    assert len(found.periods) == 24 and found.periods[-1].start == NOW.replace(minute=0)
    support, coral = seen.tenant.adapters["support"], seen.tenant.adapters["coral"]
    assert [period.requests for period in found.periods[-4:]] == [{}, {support: 3}, {NO_ID: 5}, {coral: 1}]
    assert [each.name for each in found.series] == [None, "support", "coral"] and found.series[0].base_model
    assert {line.summary.name: line.sums.requests for line in found.adapters} == {"support": 3, "coral": 1}
    assert (found.all_adapters, [each.code for each in found.failures]) == (2, ["model_not_found"])


async def test_of_many_adapters_the_largest_are_charted(database: Database) -> None:
    seen = observed_tenant(database.url, NOW)
    with psycopg.connect(database.url) as connection:
        connection.execute(
            "INSERT INTO adapters (id, tenant_id, name) SELECT gen_random_uuid(), %s, 'a' || n FROM generate_series(1, 20) n",
            [seen.id],
        )
        connection.execute(
            "INSERT INTO request_rollups SELECT tenant_id, %s, id, id, 'completed', 2,"
            " array_fill(0::bigint, '{16}'), array_fill(0::bigint, '{16}') FROM adapters"
            " WHERE tenant_id = %s AND name LIKE 'a%%'",
            [NOW.replace(minute=0), seen.id],
        )
    async with database.as_tenant(seen.id) as session:
        found = await overview.requests(session, seen.id, "24h", NOW)
    assert len(found.series) == overview.CHARTED and len(found.adapters) == overview.NAMED_ADAPTERS
    assert sum(each.sums.requests for each in found.series) == found.current.requests == 49
    assert sum(sum(period.requests.values()) for period in found.periods) == 49


async def test_spend_is_exact_and_the_forecast_begins_with_the_first_day(database: Database) -> None:
    seen = observed_tenant(database.url, NOW, budget_per_month=1)
    key, version = next(iter(seen.tenant.keys.values())), seen.tenant.version("USD")
    settle(database.url, seen.tenant, [Used(None, key, NOW - timedelta(days=1), price_version_id=version)])
    async with database.as_tenant(seen.id) as session:
        found = await overview.spend(session, seen.id, "USD", NOW, 1)
        notes = await overview.attention(session, seen.id, found, NOW)
    slow = 1000 * 3_000_001 + 384 + 66 * 7_000_003
    failed = AMOUNT - 6 * 7_000_003
    assert found.today_pico == 3 * AMOUNT + failed + slow
    assert found.month_pico == found.today_pico + AMOUNT
    assert len(found.days) == 20 and found.days[-2][1] == AMOUNT and found.days[0][1] == 0
    assert found.forecast is not None and found.forecast.low_pico == found.forecast.high_pico
    assert found.budget_used_up and found.budget_ends_early
    assert [note.kind for note in notes] == ["budget"]


async def test_a_new_tenant_has_nothing(database: Database) -> None:
    tenant = make_tenant(database.url)
    async with database.as_tenant(tenant.id) as session:
        found = await overview.requests(session, tenant.id, "30d", NOW)
        spent = await overview.spend(session, tenant.id, "USD", NOW)
        assert await overview.attention(session, tenant.id, spent, NOW) == ()
    assert found.current.requests == found.previous.requests == 0 and found.series == ()
    assert len(found.periods) == 30 and found.current.ttft_ms(50) is None
    assert (spent.month_pico, spent.forecast, spent.budget_micro) == (0, None, None)


async def test_keys_that_expire_need_attention(database: Database) -> None:
    tenant = make_tenant(database.url)
    soon, late = list(tenant.keys)
    with psycopg.connect(database.url) as connection:
        for key_id, days in ((soon, 6), (late, 9)):
            connection.execute(
                "UPDATE api_keys SET expires_at = now() + make_interval(days => %s) WHERE key_id = %s",
                [days, key_id],
            )
    async with database.as_tenant(tenant.id) as session:
        now = datetime.now(UTC)
        spent = await overview.spend(session, tenant.id, "USD", now)
        (note,) = await overview.attention(session, tenant.id, spent, now)
    assert (note.kind, note.key_id, note.key_name) == ("key_expires", soon, "k")
