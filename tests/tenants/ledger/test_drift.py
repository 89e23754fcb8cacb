"""A difference that a superuser plants in any store is found and named; without one, everything agrees."""

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pytest
from tests.tenants.ledger.stored_usage import Used, UsingTenant, make_tenant, settle

from loraplex.tenants.database import Database
from loraplex.tenants.ids import uuid7_derived, uuid7_from
from loraplex.tenants.ledger.drift import (
    DAY,
    HOUR,
    ComparedRange,
    Comparison,
    all_ranges,
    comparable_ranges,
    compare,
    first_comparable,
    monthly_ranges,
    newest_ranges,
)

HOURLY, MONTHLY = ["rollups", "monthly_rollups"], ["monthly_rollups"]
AT = datetime.now(UTC).replace(day=2, hour=10, minute=59, second=59, microsecond=990_000)


def use(url: str) -> UsingTenant:
    """Requests of two hours and two days, with and without an adapter or a price, one settled at an hour's border."""
    tenant = make_tenant(url)
    first, second = tenant.keys.values()
    version = tenant.version("USD")
    settle(
        url,
        tenant,
        [
            Used(tenant.adapters["coral"], first, AT, price_version_id=version),
            Used(tenant.adapters["coral"], first, AT + timedelta(milliseconds=20), price_version_id=version),
            Used(None, second, AT + DAY, amount_pico=1_234_567),
            Used(None, second, AT, price_version_id=version, id=UUID(int=uuid4().int | 0xF << 124)),
        ],
    )
    return tenant


async def everything(database: Database) -> list[Comparison]:
    async with database.as_operator() as session:
        assert await first_comparable(session) is not None
        parts = await comparable_ranges(session, AT + 2 * DAY, DAY)
        return [await compare(session, part) for part in parts]


def plant(url: str, statement: str) -> None:
    """Past every trigger."""
    with psycopg.connect(url) as connection:
        connection.execute("SET session_replication_role = replica")
        assert connection.execute(statement.encode()).rowcount == 1


async def test_sums_and_rows_agree(database: Database) -> None:
    use(database.url), use(database.url)
    found = await everything(database)
    assert [each for each in found if each.differing] == []
    assert {each.part.compared: each.sums for each in found if each.sums}.keys() == {
        "rollups",
        "monthly_rollups",
        "days",
        "months",
    }
    sums = {
        name: sum(each.sums for each in found if each.part.compared == name)
        for name in ("rollups", "monthly_rollups")
    }
    assert sums == {"rollups": 8, "monthly_rollups": 6}


async def test_an_empty_ledger_has_nothing_to_compare(database: Database) -> None:
    async with database.as_operator() as session:
        assert await first_comparable(session) is None


async def test_a_correction_is_in_all_sums(database: Database) -> None:
    tenant = make_tenant(database.url)
    key = next(iter(tenant.keys.values()))
    (settled,) = settle(database.url, tenant, [Used(None, key, AT, amount_pico=1_500)])
    reversing = Used(
        None,
        key,
        AT,
        uncached=-10,
        cached=-4,
        completion=-6,
        amount_pico=-1_500,
        id=uuid7_derived(settled, "correction"),
        reverses_id=settled,
    )
    settle(database.url, tenant, [reversing])
    found = await everything(database)
    assert [each for each in found if each.differing] == []
    assert sum(each.sums for each in found if each.part.compared == "rollups") == 1


@pytest.mark.parametrize(
    ("statement", "compared", "columns", "drift"),
    [
        ("UPDATE usage_rollups SET amount_pico = amount_pico + 7 {one}", HOURLY, {"amount_pico": 7}, 7),
        ("UPDATE usage_rollups SET cached_tokens = 5 {one}", HOURLY, {"cached_tokens": 1}, 0),
        ("UPDATE usage_rollups SET requests = 3 {one}", HOURLY, {"requests": 2}, 0),
        ("UPDATE monthly_rollups SET amount_pico = amount_pico - 7 {coral}", MONTHLY, {"amount_pico": -7}, 7),
        ("UPDATE monthly_rollups SET completion_tokens = 0 {coral}", MONTHLY, {"completion_tokens": -12}, 0),
        ("UPDATE usage_totals SET tokens = tokens - 2 {day}", ["days", "months"], {"tokens": -2}, 0),
        (
            "UPDATE usage_totals SET amount_nano = amount_nano + 1 {day}",
            ["days", "months"],
            {"amount_nano": 1},
            1000,
        ),
        ("UPDATE usage_totals SET requests = 9 {month}", ["months"], {"requests": 5}, 0),
    ],
)
async def test_a_changed_sum_is_found_and_named(
    database: Database, statement: str, compared: list[str], columns: dict[str, int], drift: int
) -> None:
    use(database.url)
    tenant = use(database.url)
    where = {
        "one": f"WHERE tenant_id = '{tenant.id}' AND adapter_id = '{tenant.adapters['coral']}' AND hour < '{AT}'",
        "coral": f"WHERE tenant_id = '{tenant.id}' AND adapter_id = '{tenant.adapters['coral']}'",
        "day": f"WHERE tenant_id = '{tenant.id}' AND level = 'adapter' AND period = 'd:{AT:%Y-%m-%d}'",
        "month": f"WHERE tenant_id = '{tenant.id}' AND level = 'tenant' AND period LIKE 'm:%'",
    }
    plant(database.url, statement.format(**where))
    differing = [each for each in await everything(database) if each.differing]
    assert [each.part.compared for each in differing] == compared
    (named,) = differing[0].named
    assert named.startswith(f"tenant {tenant.id}, ")
    assert named.partition(": ")[2] == ", ".join(f"{name} {by:+d}" for name, by in columns.items())
    assert differing[0].drift_pico == drift


async def test_a_missing_sum_and_one_without_rows_are_found(database: Database) -> None:
    tenant = use(database.url)
    where = f"tenant_id = '{tenant.id}' AND adapter_id = '{tenant.adapters['coral']}' AND hour < '{AT}'"
    plant(database.url, f"UPDATE usage_rollups SET hour = hour + interval '5 hours' WHERE {where}")
    (found,) = [each for each in await everything(database) if each.differing]
    assert found.part.compared == "rollups", "the month has as much as before"
    amount = 10 * 3_000_001 + 4 + 6 * 7_000_003
    assert found.drift_pico == 2 * amount
    assert sorted(each.rpartition("amount_pico ")[2].split(",")[0] for each in found.named) == [
        f"+{amount}",
        f"-{amount}",
    ]


async def test_a_changed_row_of_the_ledger_differs_from_all_its_sums(database: Database) -> None:
    tenant = use(database.url)
    plant(
        database.url,
        f"UPDATE usage_records SET amount_pico = amount_pico - 5000 WHERE tenant_id = '{tenant.id}' AND adapter_id IS NULL"
        " AND price_version_id IS NULL",
    )
    differing = [each for each in await everything(database) if each.differing]
    assert {each.part.compared: each.drift_pico for each in differing} == {"rollups": 5000, "days": 10_000}


async def test_a_deleted_row_is_found(database: Database) -> None:
    tenant = use(database.url)
    plant(
        database.url,
        f"DELETE FROM usage_records WHERE tenant_id = '{tenant.id}' AND price_version_id IS NULL",
    )
    differing = [each for each in await everything(database) if each.differing]
    assert {each.part.compared for each in differing} == {"rollups", "days"}
    assert differing[0].named


@pytest.mark.parametrize("off", [-HOUR, -timedelta(minutes=6), timedelta(minutes=6), 14 * HOUR])
async def test_rows_of_a_gateway_whose_clock_is_wrong_are_found(database: Database, off: timedelta) -> None:
    """The gateway's clock is in the ids of rows, that of the counters in the times that sums are made of."""
    tenant = use(database.url)
    key = next(iter(tenant.keys.values()))
    hour, day = (AT.replace(minute=0, second=0, microsecond=0, hour=hour) for hour in (AT.hour, 0))
    for at in (hour, AT, day, day + DAY - timedelta(milliseconds=1)):
        wrong = UUID(int=uuid7_from(at + off).int | uuid4().int >> 66)
        settle(database.url, tenant, [Used(None, key, at, amount_pico=1_500, id=wrong)])
    parts = [
        ComparedRange(compared="rollups", start=hour, end=hour + HOUR),
        ComparedRange(compared="days", start=day, end=day + DAY),
    ]
    async with database.as_operator() as session:
        found = [await compare(session, part) for part in parts]
    assert [(each.differing, each.drift_pico, each.named) for each in found] == [(0, 0, ())] * 2
    assert all(each.sums > 1 for each in found), "that of the whole comparison"
    where = f"tenant_id = '{tenant.id}' AND hour = '{hour}' AND amount_pico = 3000"
    plant(database.url, f"UPDATE usage_rollups SET amount_pico = 3001 WHERE {where}")
    async with database.as_operator() as session:
        hourly = await compare(session, parts[0])
    assert (hourly.differing, hourly.drift_pico) == (1, 1), "what else differs is named still"


async def test_many_differences_are_counted_and_few_are_named(database: Database) -> None:
    tenant = make_tenant(database.url)
    settle(database.url, tenant, [Used(uuid4(), uuid4(), AT, amount_pico=1) for _ in range(30)])
    with psycopg.connect(database.url) as connection:
        connection.execute("UPDATE usage_rollups SET amount_pico = 3")
    hourly, monthly = [each for each in await everything(database) if each.differing]
    for found in (hourly, monthly):
        assert (found.differing, found.drift_pico, len(found.named)) == (30, 60, 20)


async def test_after_a_dropped_month_comparing_begins_a_day_later(database: Database) -> None:
    tenant = use(database.url)
    month = AT.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    async with database.as_operator() as session:
        assert await first_comparable(session) == month
    key = next(iter(tenant.keys.values()))
    plant(
        database.url,
        "INSERT INTO usage_rollups (tenant_id, hour, adapter_id, api_key_id, price_version_id, currency, requests, "
        "uncached_tokens, cached_tokens, completion_tokens, amount_pico) "
        f"VALUES ('{tenant.id}', '{month - HOUR}', '{key}', '{key}', '{key}', 'USD', 1, 1, 1, 1, 1)",
    )
    async with database.as_operator() as session:
        assert await first_comparable(session) == month + DAY


def test_the_ranges_cover_every_hour_day_and_month_once() -> None:
    first, now = datetime(2026, 9, 30, tzinfo=UTC), datetime(2026, 11, 2, 5, 30, tzinfo=UTC)
    parts = [*all_ranges(first, now, HOUR)]
    assert len(parts) == len(set(parts))
    for compared, step in (("rollups", HOUR), ("days", DAY)):
        starts = sorted(part.start for part in parts if part.compared == compared)
        end = datetime(2026, 11, 3, tzinfo=UTC)
        assert starts == [first + place * step for place in range((end - first) // step)]
    months = [(part.start.month, part.end.month) for part in parts if part.compared == "months"]
    assert months == [(11, 12), (10, 11), (9, 10)]
    monthly = [(part.start, part.end) for part in monthly_ranges(first - 400 * DAY, now)]
    assert monthly[0] == (datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC))
    assert [end for _, end in monthly[1:]] == [start for start, _ in monthly[:-1]], "without a gap"
    assert monthly[-1][0] == datetime(2025, 8, 1, tzinfo=UTC)
    assert newest_ranges(now) == [
        ComparedRange(compared="rollups", start=start, end=start + HOUR)
        for start in (now.replace(minute=0), now.replace(hour=4, minute=0))
    ]
    assert {*newest_ranges(now)} <= {*parts}, "a difference of the newest hour is counted once"


def test_a_range_names_itself() -> None:
    start = datetime(2026, 11, 1, tzinfo=UTC)
    part = ComparedRange(compared="days", start=start, end=start + DAY)
    assert (str(part), part.store) == ("days 2026-11-01T00:00Z to 2026-11-02T00:00Z", "totals")
