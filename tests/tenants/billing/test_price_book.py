"""The prices of a gateway follow the cards in PostgreSQL, and stay in force while it is away."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from tests.tenants.admission.gateways import closed
from tests.tenants.registry_records import make_tenant

from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.tenants.billing import price_book
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.billing.price_table import CardKey, PriceTable
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.billing.tenant_billing import TenantBillings
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, PriceMissing

ALL = CardKey(None, None, None, "USD")


async def make(database: Database, key: CardKey, prompt: int) -> datetime:
    async with database.as_operator() as session:
        return (await RateCards(session).create(key, Price(prompt=prompt), None)).effective_from


async def first_card(database: Database) -> None:
    async with database.as_operator() as session:
        await RateCards(session).create_first("USD", Price(prompt=1))


async def test_a_book_has_every_card_and_the_currencies(database: Database) -> None:
    await first_card(database)
    tenant_id = await make_tenant(database)
    begins = await make(database, ALL, 2)
    at_poet = await make(database, CardKey(None, tenant_id, "poet", "USD"), 3)
    in_euros = await make(database, CardKey("gold", None, None, "EUR"), 4)
    european = await make_tenant(database, "europe")
    async with database.as_operator() as session:
        billings = TenantBillings(session)
        await billings.change(await billings.locked(european), {"currency": "EUR"})
    book = await PriceBook.open(database)
    now, step = datetime.now(UTC), timedelta(microseconds=1)
    assert book.table.price(tenant_id, "gold", None, now).price.prompt == 1
    assert book.table.price(tenant_id, "gold", None, begins - step).price.prompt == 1
    assert book.table.price(tenant_id, "gold", None, begins).price.prompt == 2
    assert book.table.price(tenant_id, "gold", "poet", at_poet).price.prompt == 3
    assert max(each.price.prompt for each in book.table.prices_near(tenant_id, "gold", "poet", now)) == 3
    assert book.table.currency(european, now) == "EUR" and book.table.currency(uuid4(), now) == "USD"
    found = book.table.price(european, "gold", "poet", in_euros)
    assert (found.price.prompt, found.currency) == (4, "EUR")
    with pytest.raises(PriceMissing, match=f"no price in EUR.*{european}.*free"):
        book.table.price(european, "free", None, in_euros)


async def test_a_price_of_reasoning_is_in_the_book(database: Database) -> None:
    await first_card(database)
    thinking = Price(prompt=2, cached_prompt=1, completion=3, reasoning=5)
    async with database.as_operator() as session:
        begins = (await RateCards(session).create(ALL, thinking, None)).effective_from
    book = await PriceBook.open(database)
    assert book.table.price(uuid4(), "free", None, begins).price == thinking


async def test_a_change_is_read_once_and_an_unchanged_table_not_at_all(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await first_card(database)
    book, read = await PriceBook.open(database), 0
    load_table = price_book.load_table

    async def counted(session: AsyncSession) -> PriceTable:
        nonlocal read
        read += 1
        return await load_table(session)

    monkeypatch.setattr(price_book, "load_table", counted)
    await book.reload(database)
    assert read == 0
    begins = await make(database, ALL, 2)
    await book.reload(database)
    await book.reload(database)
    assert read == 1 and book.table.price(uuid4(), "gold", None, begins).price.prompt == 2


async def test_versions_that_ended_long_ago_are_not_read(database: Database) -> None:
    await first_card(database)
    async with database.as_operator() as session:
        await session.execute(text("RESET ROLE"))
        await session.execute(text("ALTER TABLE price_versions DISABLE TRIGGER keep_price_version"))
        await session.execute(
            text("UPDATE price_versions SET effective = tstzrange(lower(effective), '2026-01-01Z')")
        )
        await session.execute(text("ALTER TABLE price_versions ENABLE TRIGGER keep_price_version"))
    book = await PriceBook.open(database)
    with pytest.raises(PriceMissing):
        book.table.price(uuid4(), "gold", None, datetime(2025, 12, 1, tzinfo=UTC))


async def test_prices_stay_in_force_while_postgresql_is_away_and_follow_when_it_is_back(
    embedded_services: EmbeddedServices, database: Database
) -> None:
    await first_card(database)
    book, tenant_id = await PriceBook.open(database), uuid4()
    running = asyncio.create_task(book.run(database, every_s=0.01))
    try:
        async with closed(embedded_services, database):
            await asyncio.sleep(0.2)
            with pytest.raises(DatabaseUnavailable):
                await book.reload(database)
            outdated_s = book.age_s
            assert book.table.price(tenant_id, "gold", None, datetime.now(UTC)).price.prompt == 1
        begins = await make(database, ALL, 2)
        async with asyncio.timeout(60):
            while book.table.price(tenant_id, "gold", None, begins).price.prompt == 1:
                await asyncio.sleep(0.01)
            while book.age_s >= outdated_s:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
