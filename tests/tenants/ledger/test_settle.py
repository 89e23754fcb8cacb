"""A settlement writes a row, its rollups, phases and totals together and once, also by several gateways at a time."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from tests.tenants.billing.fixed_prices import fixed_version
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.database import Database
from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.ledger.histograms import EMPTY, GAP_BOUNDS_MS, TTFT_BOUNDS_MS, bucket_of, counted
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.models import NO_ID
from loraplex.tenants.quotas.periods import periods_of
from loraplex.tenants.quotas.reservation import (
    NOTHING_USED,
    RequestTimings,
    Reservation,
    ReservationRequest,
    SettledUsage,
)

AT = datetime(2026, 11, 30, 23, 59, 59, 999_000, tzinfo=UTC)
ADAPTER, KEY = UUID(int=7), UUID(int=8)
PRICE = fixed_version(Price(prompt=100, cached_prompt=50, completion=120))
ROLLUPS = """
    SELECT tenant_id, hour, adapter_id, api_key_id, price_version_id, currency, requests, uncached_tokens, cached_tokens,
        completion_tokens, amount_pico FROM usage_rollups ORDER BY 1, 2, 3, 4
"""
SUMS = """
    SELECT tenant_id, date_trunc('hour', admitted_at, 'UTC'), coalesce(adapter_id, :no_id), api_key_id,
        coalesce(price_version_id, :no_id), currency, count(*), sum(uncached_tokens)::bigint, sum(cached_tokens)::bigint,
        sum(completion_tokens)::bigint, sum(amount_pico) FROM usage_records GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4
"""
TOTALS = (
    "SELECT tenant_id, subject_id, period, requests, tokens, amount_nano FROM usage_totals ORDER BY 1, 2, 3"
)
TOTAL_SUMS = """
    SELECT tenant_id, s.subject_id, p.period, count(*), sum(uncached_tokens + cached_tokens + completion_tokens)::bigint,
        sum((amount_pico + 999) / 1000)::bigint
    FROM usage_records CROSS JOIN LATERAL (VALUES (tenant_id), (api_key_id), (adapter_id)) s (subject_id)
    CROSS JOIN LATERAL (VALUES (day), (month)) p (period) WHERE s.subject_id IS NOT NULL GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""


@pytest.fixture
async def ledger(database: Database) -> AsyncIterator[UsageLedger]:
    ledger = UsageLedger(database)
    yield ledger
    await ledger.close()


def reservation(
    tenant_id: UUID, at: datetime = AT, *, key: UUID = KEY, adapter: UUID | None = ADAPTER
) -> Reservation:
    periods = periods_of(at)
    request = ReservationRequest(
        id=UUID(int=uuid7_from(at).int | random.getrandbits(60)),
        tenant_id=tenant_id,
        api_key_id=key,
        adapter_id=adapter,
        request_id="client-1",
        prompt_tokens=10,
        completion_tokens=10,
    )
    return Reservation(request=request, day=periods.day, month=periods.month, admitted_at=at, price=PRICE)


def usage(prompt: int = 10, cached: int = 4, completion: int = 5, amount: int = 1001) -> SettledUsage:
    return SettledUsage(
        outcome="completed",
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        amount_pico=amount,
    )


async def read(database: Database, query: str, **parameters: object) -> list[tuple[Any, ...]]:
    async with database.as_operator() as session:
        return [tuple(row) for row in await session.execute(text(query), parameters)]


async def check_sums(database: Database) -> None:
    """Rollups and totals are the sums of the rows."""
    assert await read(database, ROLLUPS) == await read(database, SUMS, no_id=NO_ID)
    assert await read(database, TOTALS) == await read(database, TOTAL_SUMS)


async def test_a_row_in_disjoint_classes_in_the_month_of_its_id(
    database: Database, ledger: UsageLedger
) -> None:
    tenant_id = await make_tenant(database)
    for at in (AT, AT + timedelta(milliseconds=1)):
        await read(database, "SELECT add_usage_partition('usage_records', :at)", at=at)
        assert (await ledger.settle(reservation(tenant_id, at), usage())).written
    columns = "tableoid::regclass::text, uncached_tokens, cached_tokens, completion_tokens, currency, client_request_id"
    rows = await read(database, f"SELECT {columns}, month FROM usage_records ORDER BY id")
    assert rows == [
        (f"usage_records_2026_{month}", 6, 4, 5, "USD", "client-1", f"m:2026-{month}")
        for month in ("11", "12")
    ]
    await check_sums(database)
    assert [row[1] for row in await read(database, ROLLUPS)] == [
        datetime(2026, 11, 30, 23, tzinfo=UTC),
        datetime(2026, 12, 1, tzinfo=UTC),
    ]


async def test_timings_become_histograms_and_phases(database: Database, ledger: UsageLedger) -> None:
    tenant_id = await make_tenant(database)
    timings = RequestTimings(
        ttft_ms=10,
        duration_ms=40_000,
        phases={"queue": (3, 4), "decode": (7, 33)},
        gap_buckets=counted(GAP_BOUNDS_MS, [1, 2, 2, 9999]),
    )
    timed = replace(usage(), timings=timings)
    slow = replace(timed, timings=replace(timings, ttft_ms=30_001, phases={}))
    settled = reservation(tenant_id)
    await ledger.settle(settled, timed)
    await ledger.settle(settled, timed)
    for each in (slow, usage(), NOTHING_USED):
        await ledger.settle(reservation(tenant_id), each)
    columns = "status, requests, ttft_buckets, gap_buckets"
    ((status, requests, ttft, gaps),) = await read(database, f"SELECT {columns} FROM request_rollups")
    assert (status, requests) == ("completed", 3)
    assert ttft == [1, *EMPTY[1:-1], 1]
    assert gaps == [2, 4, *EMPTY[2:-1], 2]
    found = await read(database, "SELECT id, tenant_id, phases FROM request_phases")
    assert found == [(settled.id, tenant_id, {"queue": [3, 4], "decode": [7, 33]})]
    found = await read(
        database, "SELECT ttft_ms, duration_ms FROM usage_records WHERE id = :id", id=settled.id
    )
    assert found == [(10, 40_000)]


def test_a_bound_belongs_to_its_bucket() -> None:
    for bounds in (TTFT_BOUNDS_MS, GAP_BOUNDS_MS):
        assert len(bounds) + 1 == len(EMPTY) and list(bounds) == sorted(set(bounds))
        assert [bucket_of(bounds, bound) for bound in bounds] == [*range(len(bounds))]
        assert bucket_of(bounds, bounds[-1] + 0.1) == len(bounds)
        assert bucket_of(bounds, 0) == 0


async def test_what_is_sent_twice_in_one_batch_counts_once(database: Database, ledger: UsageLedger) -> None:
    tenant_id = await make_tenant(database)
    twice = reservation(tenant_id)
    await asyncio.gather(*(ledger.settle(twice, usage()) for _ in range(3)))
    assert await read(database, "SELECT count(*) FROM usage_records") == [(1,)]
    assert await read(database, "SELECT sum(requests) FROM request_rollups") == [(1,)]
    await check_sums(database)


async def test_several_gateways_write_the_same_sums_without_deadlock(database: Database) -> None:
    """Every row is sent by two of four gateways, each in another order: all sums are exact, and none is refused."""
    tenants = [await make_tenant(database, f"tenant-{number}") for number in range(4)]
    keys, adapters = [uuid4() for _ in range(3)], [None, *(uuid4() for _ in range(3))]
    generator = random.Random(15)
    rows = [
        (
            reservation(
                generator.choice(tenants), key=generator.choice(keys), adapter=generator.choice(adapters)
            ),
            usage(completion=generator.randrange(9), amount=generator.randrange(10**9)),
        )
        for _ in range(300)
    ]
    ledgers = [UsageLedger(database) for _ in range(4)]

    async def send(number: int, ledger: UsageLedger) -> int:
        mine = rows[:150] if number % 2 else rows[150:]
        random.Random(number).shuffle(mine)
        written = 0
        for first in range(0, len(mine), 30):
            batch = [ledger.settle(*each) for each in mine[first : first + 30]]
            written += sum(each.written for each in await asyncio.gather(*batch))
        return written

    try:
        written = await asyncio.gather(*map(send, range(4), ledgers))
    finally:
        for ledger in ledgers:
            await ledger.close()
    assert sum(written) == len(rows)
    assert await read(database, "SELECT count(*), sum(amount_pico) FROM usage_records") == [
        (len(rows), sum(each.amount_pico for _, each in rows))
    ]
    await check_sums(database)
