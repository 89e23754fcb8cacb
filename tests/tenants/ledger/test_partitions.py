"""Partitions are there before their rows, leave after their retention, and hold up no writer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from tests.tenants.ledger.settled_rows import read, reservation, usage
from tests.tenants.registry_records import make_tenant

from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS
from loraplex.platform.datastores.migrations import upgrade
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.partitions import LedgerPartitions, LedgerRetention
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.quotas.reservation import RequestTimings, SettledUsage

pytestmark = pytest.mark.parametrize("postgres_major", POSTGRES_MAJORS, indirect=True)
NAMES = """
    SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = CAST(:parent AS regclass) ORDER BY 1
"""
TIMED = SettledUsage(outcome="completed", timings=RequestTimings(phases={"queue": (0, 1)}))


async def names(database: Database, parent: str) -> set[str]:
    return {name for (name,) in await read(database, NAMES, parent=parent)}


async def add(database: Database, parent: str, at: datetime) -> None:
    await read(database, "SELECT add_usage_partition(:parent, :at)", parent=parent, at=at)


def month_name(months_ago: int) -> tuple[datetime, str]:
    now = datetime.now(UTC)
    year, month = divmod(now.year * 12 + now.month - 1 - months_ago, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC), f"usage_records_{year}_{month + 1:02}"


async def keeper_of_today(database: Database, retention: LedgerRetention) -> LedgerPartitions:
    """A keeper that has nothing to make: the copied schema may be of yesterday."""
    keeper = LedgerPartitions(database.url, retention)
    await keeper.keep_up()
    return keeper


async def test_what_is_needed_soon_is_there(empty_database_url: str) -> None:
    await asyncio.to_thread(upgrade, empty_database_url)
    keeper = LedgerPartitions(empty_database_url, LedgerRetention())
    assert await keeper.keep_up() == ([], [])
    made = (await keeper.keep_up(datetime(2031, 11, 30, 23, 59, tzinfo=UTC)))[1]
    assert made == [
        *(f"usage_records_{month}" for month in ("2031_11", "2031_12", "2032_01")),
        "request_phases_2031_11_30",
        *(f"request_phases_2031_12_{day:02}" for day in range(1, 8)),
    ]


async def test_what_is_past_its_retention_is_dropped(database: Database) -> None:
    tenant_id, now = await make_tenant(database), datetime.now(UTC)
    keeper = await keeper_of_today(database, LedgerRetention(ledger_months=2, phases_days=3))
    kept, old = month_name(2), month_name(3)
    for at, _ in (kept, old, month_name(30)):
        await add(database, "usage_records", at)
    for days in (3, 4, 9):
        await add(database, "request_phases", now - timedelta(days=days))
    ledger = UsageLedger(database)
    for at in (kept[0], old[0]):
        await ledger.settle(reservation(tenant_id, at), TIMED)
    dropped, made = await keeper.keep_up()
    day_names = [(now - timedelta(days=days)).strftime("request_phases_%Y_%m_%d") for days in (9, 4)]
    assert (dropped, made) == ([month_name(30)[1], old[1], *day_names], [])
    assert kept[1] in await names(database, "usage_records")
    assert await read(database, "SELECT admitted_at FROM usage_records") == [(kept[0],)]
    assert await read(database, "SELECT id FROM request_phases") == [], "the default partition is emptied"
    assert await read(database, "SELECT sum(requests) FROM usage_rollups") == [(2,)]
    # A row that comes after its month was dropped is not lost.
    await ledger.settle(reservation(tenant_id, old[0]), usage())
    await ledger.close()
    found = await read(database, "SELECT tableoid::regclass::text FROM usage_records ORDER BY id")
    assert found == [("usage_records_default",), (kept[1],)]


@asynccontextmanager
async def reading(database: Database) -> AsyncIterator[None]:
    """A report that reads the ledger for as long as the block runs."""
    async with database.as_operator() as session:
        await session.execute(text("SELECT count(*) FROM usage_records"))
        yield


async def test_a_busy_table_is_left_to_the_next_time(database: Database) -> None:
    old, keeper = month_name(30), await keeper_of_today(database, LedgerRetention())
    await add(database, "usage_records", old[0])
    async with reading(database):
        assert await keeper.keep_up() == ([], [])
        assert old[1] in await names(database, "usage_records")
    assert await keeper.keep_up() == ([old[1]], [])


async def test_a_month_whose_rows_are_in_the_default_partition_stays_there(
    database: Database,
) -> None:
    tenant_id, at = await make_tenant(database), datetime(2031, 5, 2, tzinfo=UTC)
    ledger = UsageLedger(database)
    await ledger.settle(reservation(tenant_id, at), usage())
    await ledger.close()
    made = (await LedgerPartitions(database.url, LedgerRetention()).keep_up(at))[1]
    assert "usage_records_2031_05" not in made and "usage_records_2031_06" in made
    assert await read(database, "SELECT tableoid::regclass::text FROM usage_records") == [
        ("usage_records_default",)
    ]


async def test_two_gateways_make_the_same_partitions(database: Database) -> None:
    at = datetime(2032, 2, 10, tzinfo=UTC)
    keepers = [LedgerPartitions(database.url, LedgerRetention()) for _ in range(3)]
    made = await asyncio.gather(*(keeper.keep_up(at) for keeper in keepers))
    left = await LedgerPartitions(database.url, LedgerRetention()).keep_up(at)
    names = [name for _, some in [*made, left] for name in some]
    assert len(names) == len(set(names)) == 11
