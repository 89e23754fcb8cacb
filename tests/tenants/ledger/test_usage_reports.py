"""Reports from rollups against sums over the rows themselves, over random requests, prices, ranges and groups."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncSession
from tests.tenants.ledger.stored_usage import Used, UsingTenant, make_tenant, settle

from loraplex.tenants.database import Database
from loraplex.tenants.ledger.usage_reports import (
    CLASSES,
    NO_CLASS,
    Bucket,
    Dimension,
    UsageKey,
    UsageQuery,
    UsageRow,
    UsageSums,
    ranked_rows,
    totals_of,
    usage_rows,
    usage_totals,
)
from loraplex.tenants.models import NO_ID
from loraplex.tenants.models.usage import REST

FIRST = datetime(2026, 10, 30, 20, tzinfo=UTC)
HOUR = timedelta(hours=1)
DIMENSIONS: tuple[Dimension, ...] = ("tenant", "adapter", "key", "class")
TOKENS = st.integers(0, 50) | st.just(10**12)
FoundT = TypeVar("FoundT")


def used(reasoning: int, **fields: Any) -> Used:
    return Used(**fields, reasoning=min(reasoning, fields["completion"]))


def requests_of(tenant: UsingTenant) -> st.SearchStrategy[list[Used]]:
    return st.lists(
        st.builds(
            used,
            reasoning=st.integers(0, 50),
            adapter_id=st.sampled_from([None, *tenant.adapters.values()]),
            api_key_id=st.sampled_from([*tenant.keys.values()]),
            at=st.integers(0, 4 * 24 * 60).map(lambda minutes: FIRST + timedelta(minutes=minutes)),
            uncached=TOKENS,
            cached=TOKENS,
            completion=st.integers(0, 50),
            price_version_id=st.sampled_from([None, *tenant.prices]),
            amount_pico=st.integers(0, 10**12),
        ),
        max_size=20,
    )


def in_session(url: str, tenant_id: UUID | None, work: Callable[[AsyncSession], Awaitable[FoundT]]) -> FoundT:
    async def run() -> FoundT:
        database = Database(url, pool_size=1)
        try:
            role = database.as_operator() if tenant_id is None else database.as_tenant(tenant_id)
            async with role as session:
                return await work(session)
        finally:
            await database.close()

    return asyncio.run(run())


def bucket_start(at: datetime, bucket: Bucket) -> datetime:
    hour = at.replace(minute=0)
    if bucket == "1h":
        return hour
    return hour.replace(hour=0) if bucket == "1d" else hour.replace(hour=0, day=1)


def naive(tenant: UsingTenant, query: UsageQuery, requests: list[Used]) -> dict[UsageKey, tuple[int, ...]]:
    """Sums in Python: (requests, prompt, cached, completion, reasoning, amount) by group."""
    sums: dict[UsageKey, list[int]] = defaultdict(lambda: [0] * 6)
    for used in map(tenant.priced, requests):
        if not query.start <= used.at < query.end:
            continue
        ids = (
            tenant.id if "tenant" in query.group_by else NO_ID,
            (used.adapter_id or NO_ID) if "adapter" in query.group_by else NO_ID,
            used.api_key_id if "key" in query.group_by else NO_ID,
        )
        for token_class, values in classes_of(tenant, used, by_class="class" in query.group_by):
            place = UsageKey(bucket_start(used.at, query.bucket), *ids, used.currency, token_class)
            sums[place] = [a + b for a, b in zip(sums[place], [1, *values], strict=True)]
    groups: dict[Any, int] = defaultdict(int)
    for key, found in sums.items():
        groups[key[:5]] = max(groups[key[:5]], found[0])
    return {
        key: (groups[key[:5]], *found[1:])
        for key, found in sums.items()
        if "class" not in query.group_by or any(found[1:]) or is_unused(sums, key)
    }


def is_unused(sums: dict[UsageKey, list[int]], key: UsageKey) -> bool:
    """Of requests that used nothing, the first class has a row."""
    of_group = [found for other, found in sums.items() if other[:5] == key[:5]]
    return key.token_class == 0 and not any(any(found[1:]) for found in of_group)


def classes_of(tenant: UsingTenant, used: Used, *, by_class: bool) -> list[tuple[int, tuple[int, ...]]]:
    whole = (
        used.uncached + used.cached,
        used.cached,
        used.completion,
        used.reasoning,
        used.amount_pico,
    )
    if not by_class:
        return [(NO_CLASS, whole)]
    price = tenant.prices.get(used.price_version_id) if used.price_version_id else None
    amounts, answer = (0, 0, 0, 0), used.completion - used.reasoning
    if price is not None:
        amounts = (
            used.uncached * price.prompt,
            used.cached * price.cached_prompt,
            answer * price.completion,
            used.reasoning * (price.completion if price.reasoning is None else price.reasoning),
        )
    return [
        (0, (used.uncached, 0, 0, 0, amounts[0])),
        (1, (used.cached, used.cached, 0, 0, amounts[1])),
        (2, (0, 0, answer, 0, amounts[2])),
        (3, (0, 0, 0, 0, used.amount_pico - sum(amounts))),
        (4, (0, 0, used.reasoning, used.reasoning, amounts[3])),
    ]


async def all_rows(session: AsyncSession, query: UsageQuery, page: int) -> list[UsageRow]:
    """Page by page."""
    rows: list[UsageRow] = []
    while True:
        after = rows[-1].key if rows else None
        found = await usage_rows(session, query, after, page)
        rows += found
        if len(found) < page:
            return rows


@settings(max_examples=40)
@given(st.data())
def check_reports(url: str, data: st.DataObject) -> None:
    tenant, other = make_tenant(url), make_tenant(url)
    requests = data.draw(requests_of(tenant))
    settle(url, tenant, requests)
    settle(url, other, [Used(None, next(iter(other.keys.values())), FIRST)])
    hours = sorted(data.draw(st.lists(st.integers(0, 4 * 24), min_size=2, max_size=2, unique=True)))
    as_operator = data.draw(st.booleans())
    query = UsageQuery(
        tenant_id=tenant.id,
        start=FIRST + hours[0] * HOUR,
        end=FIRST + hours[1] * HOUR,
        bucket=data.draw(st.sampled_from(("1h", "1d", "1mo"))),
        group_by=frozenset(data.draw(st.sets(st.sampled_from(DIMENSIONS)))),
    )
    page = data.draw(st.integers(1, 4))

    async def work(session: AsyncSession) -> tuple[list[UsageRow], dict[str, UsageSums]]:
        return await all_rows(session, query, page), await usage_totals(session, query)

    rows, totals = in_session(url, None if as_operator else tenant.id, work)
    expected = naive(tenant, query, requests)
    assert {row.key: astuple(row.sums) for row in rows} == expected
    assert [row.key for row in rows] == sorted(expected), "sorted, and none twice"
    for currency, total in totals.items():
        own = [sums for key, sums in expected.items() if key.currency == currency]
        assert astuple(total)[1:] == tuple(map(sum, zip(*own, strict=True)))[1:]
    assert {key.currency for key in expected} == set(totals)
    names = {identity: name for name, identity in (tenant.adapters | tenant.keys).items()}
    for row in rows:
        assert row.adapter == names.get(row.key.adapter_id)
        assert row.key_id == names.get(row.key.api_key_id)
        assert row.token_class == (CLASSES[row.key.token_class] if "class" in query.group_by else None)


@settings(max_examples=25)
@given(st.data())
def check_ranked(url: str, data: st.DataObject) -> None:
    tenant = make_tenant(url)
    settle(url, tenant, data.draw(requests_of(tenant)))
    ranked: Literal["adapter", "key"] = data.draw(st.sampled_from(("adapter", "key")))
    query = UsageQuery(
        tenant_id=tenant.id,
        adapter=data.draw(st.sampled_from([None, "coral"])),
        key_id=data.draw(st.sampled_from([None, next(iter(tenant.keys))])),
        start=FIRST,
        end=FIRST + 5 * 24 * HOUR,
        bucket=data.draw(st.sampled_from(("1h", "1d"))),
        group_by=frozenset({ranked}),
    )
    named = data.draw(st.integers(0, 3))

    async def work(session: AsyncSession) -> tuple[list[UsageRow], list[UsageRow]]:
        return await ranked_rows(session, query, ranked, named), await all_rows(session, query, 100)

    rows, every = in_session(url, tenant.id, work)
    assert totals_of(rows) == totals_of(every), "nothing is lost or counted twice"
    for currency in ("EUR", "USD"):
        amounts: dict[UUID, tuple[int, int]] = defaultdict(lambda: (0, 0))
        own = [row for row in every if row.currency == currency]
        for row in own:
            before = amounts[group_of(row)]
            amounts[group_of(row)] = (before[0] - row.sums.amount_pico, before[1] - row.sums.requests)
        largest = sorted(amounts, key=lambda group: (amounts[group], group))[:named]
        shown = {row.key: row.sums for row in rows if row.currency == currency and group_of(row) != REST}
        assert shown == {row.key: row.sums for row in own if group_of(row) in largest}


def group_of(row: UsageRow) -> UUID:
    return row.key.adapter_id if row.key.api_key_id == NO_ID else row.key.api_key_id


def test_the_largest_groups_and_the_rest_add_up(database_url: str) -> None:
    check_ranked(database_url)


def test_reports_equal_sums_over_the_rows(database_url: str) -> None:
    check_reports(database_url)
