"""The demo's sample usage: written once, as the ledger writes requests, marked as a sample, and billed to the last digit."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.platform.demo.prepared import prepare
from tests.tenants.ledger.settled_rows import read

from loraplex.adapters.push import FolderPush
from loraplex.platform.demo.history import ISSUER, SAMPLE_KEY
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.invoices.invoices import InvoiceRepository
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.rows import export_invoice
from loraplex.tenants.invoices.verification import verify_export
from loraplex.tenants.ledger.drift import compare_ledger

TENANTS = 3
PRICE = Price(prompt=100_000, cached_prompt=50_000, completion=400_000)
ROWS = """
    SELECT r.tenant_id, r.admitted_at, r.client_request_id, r.amount_pico, k.name, k.revoked_at IS NOT NULL,
        r.tableoid::regclass::text
    FROM usage_records r JOIN api_keys k ON k.id = r.api_key_id ORDER BY r.id
"""


@pytest.fixture(autouse=True)
async def first_card(database: Database) -> None:
    """The card that a gateway makes before the demo is prepared."""
    async with database.as_operator() as session:
        await RateCards(session).create_first("USD", PRICE)


async def finals(database: Database) -> list[Any]:
    async with database.as_operator() as session:
        repository = InvoiceRepository(session)
        return [await repository.details(each) for each in await repository.page({}, None, 100)]


async def test_usage_until_yesterday_that_is_marked_and_adds_up(
    database: Database, push: FolderPush, tmp_path: Path
) -> None:
    before = datetime.now(UTC)
    await prepare(database, push, tmp_path)
    rows = await read(database, ROWS)
    by_tenant = {tenant: [row for row in rows if row[0] == tenant] for tenant, *_ in rows}
    assert len(by_tenant) == TENANTS
    last_month = Month.of(before).previous
    for some in by_tenant.values():
        # From 28 days, on the first of March, to 61.
        assert 40 <= len(some) <= 250
        days = {row[1].date() for row in some}
        assert {Month.of(row[1]) for row in some} <= {last_month, Month.of(before)}
        assert len(days) >= 20 and max(days) < before.date()
        assert len({row[2] for row in some}) == len(some)
    assert all(row[2].startswith("demo-history-") and row[3] > 0 for row in rows)
    assert {row[4:6] for row in rows} == {(SAMPLE_KEY, True)}
    assert {row[6] for row in rows} <= {
        f"usage_records_{m.year}_{m.month:02}" for m in (last_month, Month.of(before))
    }
    sums = await compare_ledger(database)
    assert all(each.sums and not each.differing for each in sums), sums


async def test_its_month_has_a_final_invoice_that_recomputes_offline(
    database: Database, push: FolderPush, tmp_path: Path
) -> None:
    await prepare(database, push, tmp_path)
    found = await finals(database)
    assert len(found) == TENANTS
    for invoice in found:
        assert (invoice.state, invoice.content.terms.issuer) == ("final", ISSUER)
        assert invoice.month == Month.of(datetime.now(UTC)).previous
        assert invoice.content.totals.total_micro > 0
        folder = tmp_path / str(invoice.id)
        async with database.as_operator() as session:
            await export_invoice(session, invoice.id, folder)
        assert verify_export(folder) == []


async def test_an_interrupted_start_goes_on_and_no_later_one_adds_anything(
    database: Database, push: FolderPush, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(*_: object, **__: object) -> None:
        raise DatabaseUnavailable("stopped")

    with monkeypatch.context() as stopped:
        stopped.setattr(invoices, "finalize", unavailable)
        with pytest.raises(DatabaseUnavailable):
            await prepare(database, push, tmp_path)
    [(written,)] = await read(database, "SELECT count(*) FROM usage_records")
    assert written and not await finals(database)
    await prepare(database, push, tmp_path)
    rows = await read(database, "SELECT id FROM usage_records ORDER BY id")
    assert len(rows) > written and len(await finals(database)) == TENANTS
    await prepare(database, push, tmp_path)
    assert await read(database, "SELECT id FROM usage_records ORDER BY id") == rows
    assert len(await finals(database)) == TENANTS
    assert not any(each.differing for each in await compare_ledger(database))


async def test_a_month_without_one_price_gets_none(
    database: Database, push: FolderPush, tmp_path: Path
) -> None:
    async with database.as_operator() as session:
        await RateCards(session).create(CardKey(None, None, None, "USD"), PRICE, None)
    await prepare(database, push, tmp_path)
    assert not await read(database, "SELECT id FROM usage_records") and not await finals(database)
