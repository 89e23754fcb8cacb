"""The cost of an hour over the tokens of the rollups, in integers, beside what they were charged."""

from datetime import UTC, datetime, timedelta

from tests.tenants.ledger.stored_usage import Used, make_tenant, settle

from loraplex.tenants.database import Database
from loraplex.tenants.ledger.serving_cost import (
    AcceleratorPrice,
    ServingCost,
    cost_per_million,
    serving_cost,
)
from loraplex.tenants.ledger.usage_reports import UsageSums

START = datetime(2026, 10, 30, 20, tzinfo=UTC)
HOUR = timedelta(hours=1)
PRICE = AcceleratorPrice(2_500_000, "USD")


async def read(database: Database, hours: int, now: datetime) -> ServingCost:
    async with database.as_operator() as session:
        return await serving_cost(session, PRICE, START, START + hours * HOUR, now)


async def test_cost_price_and_margin_of_all_tenants(database: Database) -> None:
    for _ in range(2):
        tenant = make_tenant(database.url)
        key = next(iter(tenant.keys.values()))
        used = Used(None, key, START, 600, 200, 200, None, amount_pico=4_000_000_000_000)
        settle(database.url, tenant, [used, Used(None, key, START - HOUR)])
    cost = await read(database, 2, START + 2 * HOUR)
    assert (cost.cost_micro, cost.tokens, cost.other_currencies) == (5_000_000, 2000, ())
    assert cost.cost_per_million_micro == 2_500_000_000
    assert cost.price_per_million_micro == 4_000_000_000
    assert cost.margin_micro == 3_000_000


async def test_usage_in_another_currency_has_tokens_but_no_margin(database: Database) -> None:
    tenant = make_tenant(database.url)
    key = next(iter(tenant.keys.values()))
    settle(database.url, tenant, [Used(None, key, START, price_version_id=tenant.version("EUR"))])
    cost = await read(database, 1, START + HOUR)
    assert (cost.tokens, cost.sums, cost.other_currencies) == (20, UsageSums(), ("EUR",))
    assert cost.cost_per_million_micro == 125_000_000_000
    assert (cost.margin_micro, cost.price_per_million_micro) == (None, None)


async def test_hours_to_come_cost_nothing_and_no_tokens_have_no_cost(database: Database) -> None:
    cost = await read(database, 24, START + timedelta(minutes=30))
    assert (cost.cost_micro, cost.tokens, cost.cost_per_million_micro) == (1_250_000, 0, None)
    assert (await read(database, 24, START - HOUR)).cost_micro == 0


def test_costs_are_rounded_half_up() -> None:
    second = 1_000_000
    assert cost_per_million(3600, 2_000_000, second) == 1
    assert cost_per_million(3600, 2_000_001, second) == 0
    assert cost_per_million(2_500_000, 1000, second) == 694_444
