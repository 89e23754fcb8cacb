"""A settlement writes a row, its rollups, phases and totals together and once, also by several gateways at a time."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from tests.tenants.ledger.settled_rows import AT, ROLLUPS, check_sums, read, reservation, usage
from tests.tenants.registry_records import make_tenant

from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.histograms import EMPTY, GAP_BOUNDS_MS, counted
from loraplex.tenants.ledger.journal.records import read_usage, usage_text
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.quotas.reservation import (
    NOTHING_USED,
    LimitAtAdmission,
    RequestTimings,
)

pytestmark = pytest.mark.parametrize("postgres_major", POSTGRES_MAJORS, indirect=True)


@pytest.fixture
async def ledger(database: Database) -> AsyncIterator[UsageLedger]:
    ledger = UsageLedger(database)
    yield ledger
    await ledger.close()


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
        causes={"queue": {"before": 2, "limit": "rows"}},
        gap_buckets=counted(GAP_BOUNDS_MS, [1, 2, 2, 9999]),
    )
    met = LimitAtAdmission("key", "budget_per_day", 30, 5, 4, 3)
    timed = replace(usage(reasoning=2), timings=timings, limits=(met,), system_fingerprint="fp_1")
    slow = replace(timed, timings=replace(timings, ttft_ms=30_001, phases={}))
    settled = reservation(tenant_id)
    settled = replace(settled, request=replace(settled.request, session="ses_1"))
    await ledger.settle(settled, timed)
    await ledger.settle(settled, timed)
    assert await ledger.known([settled.id]) == {settled.id: timed}
    for each in (slow, usage(), NOTHING_USED):
        await ledger.settle(reservation(tenant_id), each)
    columns = "status, requests, ttft_buckets, gap_buckets"
    ((status, requests, ttft, gaps),) = await read(database, f"SELECT {columns} FROM request_rollups")
    assert (status, requests) == ("completed", 3)
    assert ttft == [1, *EMPTY[1:-1], 1]
    assert gaps == [2, 4, *EMPTY[2:-1], 2]
    found = await read(database, "SELECT id, tenant_id, phases, limits FROM request_phases")
    limits = {"degraded": False, "met": [["key", "budget_per_day", 30, 5, 4, 3]]}
    assert found == [
        (settled.id, tenant_id, {"queue": [3, 4, {"before": 2, "limit": "rows"}], "decode": [7, 33]}, limits)
    ]
    found = await read(
        database,
        "SELECT ttft_ms, duration_ms, system_fingerprint, reasoning_tokens, session FROM usage_records WHERE id = :id",
        id=settled.id,
    )
    assert found == [(10, 40_000, "fp_1", 2, "ses_1")]


async def test_limits_of_an_end_that_an_earlier_release_wrote_are_unknown(
    database: Database, ledger: UsageLedger
) -> None:
    tenant_id = await make_tenant(database)
    timed = replace(usage(), timings=RequestTimings(phases={"queue": (3, 4)}, gap_buckets=EMPTY))
    written = usage_text(replace(timed, limits=())).replace(',"limits":[]', "")
    assert "limits" not in written
    for each in (read_usage(written), replace(timed, limits=())):
        await ledger.settle(reservation(tenant_id), each)
    found = await read(database, "SELECT limits FROM request_phases ORDER BY limits IS NOT NULL")
    assert found == [(None,), ({"degraded": False, "met": []},)]


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
            usage(completion=9, amount=generator.randrange(10**9), reasoning=generator.randrange(9)),
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
