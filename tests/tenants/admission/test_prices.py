"""Budgets reserve by rate cards, and each request is charged by the version in force when the counters admitted it."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from tests.tenants.admission import gateways
from tests.tenants.admission.gateways import check_ledger, make_tenant_with_gateways, usage, used
from tests.tenants.billing.fixed_prices import EVER

from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.billing.price_table import CardKey, CardVersions, PriceTable
from loraplex.tenants.billing.pricing import NO_PRICE, Price, PriceVersion
from loraplex.tenants.database import Database
from loraplex.tenants.errors import PriceMissing, QuotaExhausted

ALL = CardKey(None, None, None, "USD")
OLD = PriceVersion(
    id=UUID(int=1), currency="USD", price=Price(prompt=1_000_000, cached_prompt=7, completion=2_000_000)
)
NEW = PriceVersion(
    id=UUID(int=2), currency="USD", price=Price(prompt=3_000_001, cached_prompt=0, completion=5_000_000)
)


def use(monkeypatch: pytest.MonkeyPatch, table: PriceTable) -> None:
    """Give these prices to the gateways that the test opens."""
    monkeypatch.setattr(gateways, "fixed_prices", lambda _: PriceBook(table))


async def test_a_price_change_in_the_middle_of_requests(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    begins = datetime.now(UTC) + timedelta(seconds=0.5)
    use(
        monkeypatch, PriceTable(cards={ALL: CardVersions((EVER, begins), (OLD, NEW))}, default_currency="USD")
    )
    expected = dict[UUID, tuple[int, UUID]]()
    async with tenant.gateway() as gateway, asyncio.timeout(60):
        while {each[1] for each in expected.values()} != {OLD.id, NEW.id}:
            reservation = await gateway.admit(tenant.request())
            version = NEW if reservation.admitted_at >= begins else OLD
            assert reservation.price == version
            # Settled after the change as well: the time of admission decides.
            await asyncio.sleep(0.05)
            await gateway.settle(reservation, usage(reservation, cached=4))
            expected[reservation.id] = version.price.amount_pico(10, 4, 5), version.id
        await check_ledger(tenant, gateway)
    rows = await tenant.rows("SELECT id, amount_pico, price_version_id, currency FROM usage_records")
    assert {row["id"]: (row["amount_pico"], row["price_version_id"]) for row in rows} == expected
    assert {row["currency"] for row in rows} == {"USD"}


async def test_a_budget_reserves_by_the_tenants_own_card(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, budget_per_day=50)
    cards = {
        ALL: CardVersions((EVER,), (NO_PRICE,)),
        CardKey(None, tenant.tenant_id, None, "USD"): CardVersions((EVER,), (OLD,)),
    }
    use(monkeypatch, PriceTable(cards=cards, default_currency="USD"))
    async with tenant.gateway() as gateway:
        # 10 prompt tokens at 1 and 20 response tokens at 2 micro-units: all of the budget.
        reservation = await gateway.admit(tenant.request())
        assert (await used(gateway, tenant.tenant_id))["budget_per_day"].reserved == 50
        with pytest.raises(QuotaExhausted, match="budget_per_day"):
            await gateway.admit(tenant.request(prompt=51, completion=0))
        await gateway.settle(reservation, usage(reservation))
        await check_ledger(tenant, gateway)
        assert (await used(gateway, tenant.tenant_id))["budget_per_day"].used == 20


async def test_a_tenant_without_a_card_in_its_currency_takes_nothing(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    use(monkeypatch, PriceTable(cards={ALL: CardVersions((EVER,), (OLD,))}, default_currency="EUR"))
    async with tenant.gateway() as gateway:
        with pytest.raises(PriceMissing, match=f"no price in EUR.*tenant {tenant.tenant_id}, its tier gold"):
            await gateway.admit(replace(tenant.request(), tier="gold"))
        assert (await used(gateway, tenant.tenant_id))["tokens_per_day"].reserved == 0
