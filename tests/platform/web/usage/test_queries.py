"""The usage report: its parts add up to the totals of the API, and a download has exactly its rows."""

import csv
import io
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import psycopg
import pytest
from tests.platform.web.observed_tenant import observed_tenant
from tests.tenants.ledger.stored_usage import Used, settle

from loraplex.platform.web.usage import queries as usage
from loraplex.platform.web.usage.queries import Split, UsageFilters
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.usage_reports import CLASSES, UsageSums, usage_totals
from loraplex.tenants.models import NO_ID

NOW = datetime(2026, 11, 20, 14, 30, tzinfo=UTC)
FILTERS = UsageFilters(
    tenant_id=NO_ID,
    start=datetime(2026, 11, 19, tzinfo=UTC),
    end=datetime(2026, 11, 21, tzinfo=UTC),
    bucket="1h",
    group_by=frozenset({"adapter"}),
)
ADDED = {"key_name", "amount"}
FoundT = TypeVar("FoundT")


@pytest.mark.parametrize("split", ["adapter", "key", "class"])
async def test_groups_and_periods_add_up_to_the_totals(database: Database, split: Split) -> None:
    seen = observed_tenant(database.url, NOW)
    filters = replace(FILTERS, tenant_id=seen.id, group_by=frozenset({split}))
    async with database.as_tenant(seen.id) as session:
        found = await usage.report(session, filters, "EUR")
        expected = await usage_totals(session, filters)
    assert (found.currency, found.currencies) == ("USD", ("USD",))
    assert found.totals == expected["USD"] and found.totals.requests == 5
    amounts = [group.sums.amount_pico for group in found.groups]
    assert sum(amounts) == found.totals.amount_pico and amounts == sorted(amounts, reverse=True)
    assert sum(sum(period.amounts.values()) for period in found.periods) == found.totals.amount_pico
    assert sum(period.sums.requests for period in found.periods) == 5 and len(found.periods) == 3
    names = {"adapter": {"coral", "support", None}, "key": {seen.key_id}, "class": set(CLASSES[:3])}
    assert {group.name for group in found.groups} == names[split]


async def test_filters_select_and_currencies_are_never_added(database: Database) -> None:
    seen = observed_tenant(database.url, NOW)
    key, version = next(iter(seen.tenant.keys.values())), seen.tenant.version("EUR")
    settle(database.url, seen.tenant, [Used(None, key, NOW, price_version_id=version)])
    other = list(seen.tenant.keys)[1]
    async with database.as_tenant(seen.id) as session:

        async def requests(own: str = "USD", **chosen: object) -> tuple[int, str]:
            found = await usage.report(session, replace(FILTERS, tenant_id=seen.id, **chosen), own)  # type: ignore[arg-type]
            return found.totals.requests, found.currency

        assert await requests() == (5, "USD") and await requests("EUR") == (1, "EUR")
        assert await requests(currency="EUR") == (1, "EUR")
        assert await requests(adapter="support") == (3, "USD") and await requests(adapter="none") == (
            0,
            "USD",
        )
        assert await requests(base_model=True) == (1, "USD") and await requests(key_id=other) == (0, "USD")
        empty = await usage.report(session, replace(FILTERS, tenant_id=seen.id, key_id=other), "EUR")
    assert (empty.totals, empty.groups, empty.periods) == (UsageSums(), (), ())


async def test_the_keys_of_the_playground_are_one_group(database: Database) -> None:
    seen = observed_tenant(database.url, NOW)
    _, other, *_ = seen.tenant.keys.values()
    settle(database.url, seen.tenant, [Used(None, other, NOW)])
    with psycopg.connect(database.url) as connection:
        connection.execute("UPDATE api_keys SET kind = 'console', name = 'playground'")
    async with database.as_tenant(seen.id) as session:
        found = await usage.report(
            session, replace(FILTERS, tenant_id=seen.id, group_by=frozenset({"key"})), "USD"
        )
    [group] = found.groups
    assert (group.name, group.id) == ("playground", "playground")
    assert group.sums == found.totals and found.totals.requests == 6
    assert sum(period.amounts["playground"] for period in found.periods) == found.totals.amount_pico


async def test_a_download_has_every_row(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observed_tenant(database.url, NOW)
    monkeypatch.setattr(usage, "ROWS_AT_ONCE", 2)
    query = replace(FILTERS, tenant_id=seen.id, group_by=frozenset({"class"}))

    async def run(find: Callable[..., Awaitable[FoundT]], *args: Any) -> FoundT:
        async with database.as_tenant(seen.id) as session:
            return await find(session, *args)

    written = "".join([part async for part in usage.csv_download(run, query)])
    rows = list(csv.DictReader(io.StringIO(written)))
    documents = json.loads("".join([part async for part in usage.json_download(run, query)]))
    assert [{name: str(value or "") for name, value in each.items()} for each in documents] == [
        {name: "" if value == "0" else value for name, value in row.items() if name not in ADDED}
        for row in rows
    ]
    async with database.as_tenant(seen.id) as session:
        total = (await usage_totals(session, query))["USD"]
    assert sum(int(row["amount_pico"]) for row in rows) == total.amount_pico and len(rows) == 9
    nothing = replace(query, end=query.start + timedelta(hours=1))
    assert json.loads("".join([part async for part in usage.json_download(run, nothing)])) == []
