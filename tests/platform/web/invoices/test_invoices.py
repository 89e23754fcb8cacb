"""The steps of an invoice: one number each without gaps, credits used once, and nothing changes once it is final."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import text
from tests.tenants.invoices.billed_tenant import BilledTenant, make_billed_tenant

from loraplex.tenants.actors import system_actor
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField, InvoiceStateForbids, MonthNotOver, NothingToBill
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.invoices.credits import CreditRepository
from loraplex.tenants.invoices.invoices import InvoiceDetails, InvoiceRepository
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.records import InvoiceDocument
from loraplex.tenants.unit_of_work import unit_of_work

JANUARY, FEBRUARY, MARCH = Month(2026, 1), Month(2026, 2), Month(2026, 3)
NOW = datetime(2026, 6, 1, tzinfo=UTC)
MILLION = 1_000_000


async def finalize(
    tenant: BilledTenant, month: Month = JANUARY, currency: str | None = None
) -> InvoiceDetails:
    async with unit_of_work(tenant.database, system_actor("test"), None, None) as uow:
        invoice = await invoices.finalize(uow, tenant.id, month, now=NOW, currency=currency)
    return await shown(tenant.database, invoice.id)


async def shown(database: Database, identity: UUID) -> InvoiceDetails:
    async with database.as_operator() as session:
        repository = InvoiceRepository(session)
        return await repository.details(await repository.by_id(identity))


async def pay(database: Database, identity: UUID, reference: str = "SEPA 1") -> InvoiceDocument:
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        return await invoices.pay(uow, identity, reference)


async def void(database: Database, identity: UUID) -> InvoiceDocument:
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        return await invoices.void(uow, identity)


async def grant(tenant: BilledTenant, amount: int, currency: str = "USD") -> UUID:
    async with unit_of_work(tenant.database, system_actor("test"), None, None) as uow:
        return (await invoices.grant_credit(uow, tenant.id, amount, "welcome", currency=currency)).id


async def available(tenant: BilledTenant) -> int:
    async with tenant.database.as_operator() as session:
        balances = await CreditRepository(session, tenant.id).balances("USD")
        return sum(each.available_micro for each in balances)


async def test_an_invoice_bills_the_month_and_late_usage_is_adjusted_by_the_next(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, MILLION, MILLION, MILLION)
    await tenant.use(JANUARY.end - timedelta(microseconds=1), MILLION)
    await tenant.use(JANUARY.end, 2 * MILLION)
    first = await finalize(tenant)
    assert (first.state, first.number, first.content.totals.total_micro) == ("final", 1, 9_150_000)
    assert [(line.token_class, line.tokens, line.amount_micro) for line in first.content.totals.lines] == [
        ("cached_prompt", MILLION, 150_000),
        ("completion", MILLION, 6_000_001),
        ("uncached_prompt", 2 * MILLION, 3_000_000),
    ]
    await tenant.use(JANUARY.begin, 10 * MILLION)
    assert (await shown(database, first.id)) == first
    second = await finalize(tenant, FEBRUARY)
    assert [(line.kind, str(line.month), line.tokens) for line in second.content.totals.lines] == [
        ("adjustment", "2026-01", 10 * MILLION),
        ("usage", "2026-02", 2 * MILLION),
    ]
    assert second.content.totals.lines[0].billed.tokens == 2 * MILLION
    assert second.number == 2


async def test_a_correction_is_a_negative_line_and_may_make_a_total_negative(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 2 * MILLION)
    await finalize(tenant)
    await tenant.use(JANUARY.begin, -MILLION, kind="correction")
    await tenant.use(FEBRUARY.begin, kind="correction", amount_pico=-5 * MILLION)
    second = await finalize(tenant, FEBRUARY)
    assert [
        (line.kind, line.token_class, line.tokens, line.amount_micro) for line in second.content.totals.lines
    ] == [
        ("adjustment", "uncached_prompt", -MILLION, -1_500_000),
        ("usage", "correction", 0, -5),
    ]
    assert second.content.totals.total_micro == -1_500_000


async def test_usage_that_another_invoice_billed_counts_towards_the_minimum(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.set_terms(minimum_micro=10_000_000)
    await tenant.use(JANUARY.begin, 4 * MILLION)
    await void(database, (await finalize(tenant)).id)
    # February bills the usage of January as an adjustment, and its own minimum.
    assert (await finalize(tenant, FEBRUARY)).content.totals.total_micro == 16_000_000
    again = await finalize(tenant)
    assert [(line.kind, line.amount_micro) for line in again.content.totals.lines] == [("minimum", 4_000_000)]


async def test_terms_are_those_of_the_moment_it_became_final(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    address = {
        "issuer": "Serving Ltd",
        "customer_name": "Acme Inc",
        "customer_address": "1 Main St",
        "vat_id": "X1",
    }
    await tenant.set_terms(**address, tax_rate_ppm=190_000, minimum_micro=10_000_000)
    await tenant.use(JANUARY.begin, MILLION)
    first = await finalize(tenant)
    await tenant.set_terms(
        issuer="Other Ltd", customer_name="New", tax_rate_ppm=0, minimum_micro=0, currency="EUR"
    )
    assert await shown(database, first.id) == first
    assert first.content.terms.customer_name == "Acme Inc"
    totals = first.content.totals
    assert [line.kind for line in totals.lines] == ["usage", "minimum"]
    assert (totals.subtotal_micro, totals.tax_micro, totals.total_micro) == (
        10_000_000,
        1_900_000,
        11_900_000,
    )


async def test_credits_are_used_once_and_given_back_by_void(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 2 * MILLION)
    grant_id = await grant(tenant, 2_000_000)
    await grant(tenant, 5_000_000, "EUR")
    first = await finalize(tenant)
    assert [(use.grant_id, use.amount_micro) for use in first.content.totals.credit_uses] == [
        (grant_id, 2_000_000)
    ]
    assert (first.content.totals.total_micro, await available(tenant)) == (1_000_000, 0)
    await void(database, first.id)
    await void(database, first.id)
    assert await available(tenant) == 2_000_000
    again = await finalize(tenant)
    assert (again.number, again.id != first.id, again.content.totals.total_micro) == (2, True, 1_000_000)
    assert (await shown(database, first.id)).content == first.content


async def test_what_a_void_invoice_billed_is_billed_by_the_next_one(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, MILLION)
    await void(database, (await finalize(tenant)).id)
    await tenant.use(FEBRUARY.begin, MILLION)
    second = await finalize(tenant, FEBRUARY)
    assert [line.kind for line in second.content.totals.lines] == ["adjustment", "usage"]
    with pytest.raises(NothingToBill):
        await finalize(tenant)


async def test_usage_in_another_currency_has_an_invoice_of_its_own(database: Database) -> None:
    prices = {"USD": Price(prompt=1_000_000), "EUR": Price(prompt=2_000_000)}
    tenant = await make_billed_tenant(database, prices=prices)
    await tenant.set_terms(currency="USD", next_currency="EUR", next_currency_from=FEBRUARY.begin.date())
    await tenant.use(JANUARY.begin, MILLION, currency="USD")
    await tenant.use(FEBRUARY.begin, MILLION, currency="EUR")
    await finalize(tenant)
    await tenant.use(JANUARY.begin, MILLION, currency="USD")
    euros, dollars = await finalize(tenant, FEBRUARY), await finalize(tenant, FEBRUARY, "USD")
    assert (euros.content.terms.currency, euros.content.totals.total_micro) == ("EUR", 2_000_000)
    assert (dollars.content.terms.currency, dollars.content.totals.total_micro) == ("USD", 1_000_000)
    assert [line.kind for line in dollars.content.totals.lines] == ["adjustment"]


async def test_usage_of_before_rate_cards_is_billed_with_its_month_alone(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 5, amount_pico=7 * MILLION, with_version=False)
    await tenant.use(FEBRUARY.begin, 5, amount_pico=8 * MILLION, with_version=False)
    first = await finalize(tenant, FEBRUARY)
    assert [(str(line.month), line.amount_micro) for line in first.content.totals.lines] == [("2026-02", 8)]


async def test_the_steps_keep_their_order(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    with pytest.raises(NothingToBill):
        await finalize(tenant)
    with pytest.raises(MonthNotOver):
        await finalize(tenant, Month.of(NOW))
    await tenant.use(JANUARY.begin, 1)
    invoice = await finalize(tenant)
    assert await finalize(tenant) == invoice
    with pytest.raises(InvalidField):
        await pay(database, invoice.id, "a\nb")
    await pay(database, invoice.id)
    await pay(database, invoice.id)
    for forbidden in (pay(database, invoice.id, "SEPA 2"), void(database, invoice.id)):
        with pytest.raises(InvoiceStateForbids):
            await forbidden
    assert (await shown(database, invoice.id)).paid_reference == "SEPA 1"


async def test_numbers_have_no_gaps_whatever_fails_and_in_any_order(database: Database) -> None:
    tenants = [await make_billed_tenant(database, f"tenant-{number}") for number in range(6)]
    for tenant in tenants:
        await tenant.use(JANUARY.begin, MILLION)
        await tenant.set_terms(issuer="Serving Ltd")

    async def fail(tenant: BilledTenant) -> None:
        with pytest.raises(ZeroDivisionError):
            async with unit_of_work(database, system_actor("test"), None, None) as uow:
                await invoices.finalize(uow, tenant.id, JANUARY, now=NOW)
                raise ZeroDivisionError

    await asyncio.gather(*map(fail, tenants[:3]), *map(finalize, tenants[3:]))
    await asyncio.gather(*map(finalize, tenants), *map(finalize, tenants))
    async with database.as_operator() as session:
        numbers = (await session.scalars(text("SELECT number FROM invoices ORDER BY number"))).all()
        events = (await session.scalars(text("SELECT data ->> 'number' FROM outbox_events ORDER BY 1"))).all()
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert events == ["1", "2", "3", "4", "5", "6"]


NEW_LINE = """
    INSERT INTO invoice_lines SELECT invoice_id, 99, tenant_id, kind, month, adapter_id, adapter, token_class, price_version_id,
        price, tokens, amount_pico, amount_micro, billed_tokens, billed_pico FROM invoice_lines
"""
UNBALANCED = """
    INSERT INTO credit_entries (tenant_id, transaction_id, grant_id, account, amount_micro)
        SELECT tenant_id, gen_random_uuid(), id, 'available', 5 FROM credit_grants;
    SET CONSTRAINTS ALL IMMEDIATE
"""
OVERDRAWN = """
    INSERT INTO credit_entries (tenant_id, transaction_id, grant_id, account, amount_micro)
        SELECT tenant_id, id, id, a, m FROM credit_grants, (VALUES ('available', -1), ('consumed', 1)) v (a, m);
    SET CONSTRAINTS ALL IMMEDIATE
"""
CHANGES = {
    "UPDATE invoices SET total_micro = total_micro + 1, rounding_micro = rounding_micro + 1": "final invoice",
    "UPDATE invoices SET vat_id = 'other'": "final invoice",
    "UPDATE invoices SET state = 'draft'": "final invoice",
    "DELETE FROM invoices": "final invoice",
    "UPDATE invoice_lines SET tokens = 0, amount_pico = 0, amount_micro = 0": "lines of an invoice",
    "DELETE FROM invoice_lines": "lines of an invoice",
    NEW_LINE: "lines of an invoice",
    "UPDATE credit_grants SET amount_micro = 1": "credits are never changed",
    "DELETE FROM credit_entries": "credits are never changed",
    UNBALANCED: "sum to zero",
    OVERDRAWN: "never negative",
}


async def test_the_database_itself_keeps_what_is_final(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 2 * MILLION)
    await grant(tenant, 1_000_000)
    await finalize(tenant)
    with psycopg.connect(database.url, autocommit=True) as owner:
        for change, refusal in CHANGES.items():
            with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match=refusal):
                owner.execute(change)
