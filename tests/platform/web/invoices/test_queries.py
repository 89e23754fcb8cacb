"""A tenant's billing as its console shows it, in the tenant's own database role: prices, the month, invoices, credits, alerts."""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from itertools import product
from typing import TypeVar
from uuid import UUID, uuid4

import pytest
from sqlalchemy.event import listen
from sqlalchemy.ext.asyncio import AsyncSession
from tests.tenants.invoices.billed_tenant import BilledTenant, last_month, make_billed_tenant, now

from loraplex.platform.web.invoices import queries as billing
from loraplex.tenants.actors import system_actor
from loraplex.tenants.billing import use_cases as rate_cards
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvoiceNotFound
from loraplex.tenants.invoices import queries
from loraplex.tenants.invoices import use_cases as closing
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.models import QuotaEvent
from loraplex.tenants.pages import Part
from loraplex.tenants.unit_of_work import UnitOfWork, unit_of_work

ResultT = TypeVar("ResultT")


async def read(tenant: BilledTenant, find: Callable[[AsyncSession], Awaitable[ResultT]]) -> ResultT:
    async with tenant.database.as_tenant(tenant.id) as session:
        return await find(session)


async def operate(database: Database, work: Callable[[UnitOfWork], Awaitable[ResultT]]) -> ResultT:
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        return await work(uow)


async def test_the_most_specific_price_applies_and_a_later_one_is_rated_at_last_months_usage(
    database: Database,
) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(last_month().begin, 1_000_000)
    begins = now() + timedelta(days=3)
    for key, price in (
        (CardKey(None, None, None, "USD"), Price(prompt=9)),
        (CardKey("standard", None, None, "USD"), Price(prompt=8)),
        (CardKey("other", None, None, "USD"), Price(prompt=7)),
    ):
        await operate(database, lambda uow, key=key, price=price: rate_cards.create(uow, key, price))  # type: ignore[misc]
    own = CardKey(None, tenant.id, None, "USD")
    await operate(database, lambda uow: rate_cards.create(uow, own, Price(prompt=3_000_000), begins))
    found = await read(tenant, lambda session: billing.prices(session, tenant.id, now()))
    assert found.currency == "USD" and found.of_adapters == ()
    assert found.general is not None and found.general.id == tenant.versions["USD"]
    (coming,) = (each for each in found.coming if each.version.key == own)
    assert coming.version.effective_from == begins and coming.last_month is not None
    rated = coming.last_month
    assert (rated.billed_pico, rated.draft_pico) == (1_500_000 * 10**6, 3_000_000 * 10**6)


async def test_the_draft_of_this_month_is_computed_and_writes_nothing(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    empty = await read(tenant, lambda session: queries.draft(session, tenant.id, now()))
    assert not empty.invoice.lines and empty.invoice.currency == "USD"
    await tenant.use(now(), 2_000_000)
    draft = await read(tenant, lambda session: queries.draft(session, tenant.id, now()))
    assert draft.invoice.total_micro == 3_000_000
    last_day = Month.of(now()).end - timedelta(seconds=1)
    assert (await read(tenant, lambda session: queries.draft(session, tenant.id, last_day))).days_left == 1
    page = await read(tenant, lambda session: queries.invoices(session, tenant.id, {}, Part(9)))
    assert page == []


async def test_invoices_are_paged_and_another_tenants_are_not_found(database: Database) -> None:
    tenant, other = await make_billed_tenant(database), await make_billed_tenant(database, "other")
    for month in (last_month().previous, last_month()):
        await tenant.use(month.begin, 1_000_000)
        await operate(
            database,
            lambda uow, month=month: closing.finalize(uow, tenant.id, month, now=now()),  # type: ignore[misc]
        )
    (first,) = await read(tenant, lambda session: queries.invoices(session, tenant.id, {}, Part(1)))
    assert first.total_micro == 1_500_000
    behind = Part(2, (first.created_at, first.id))
    rest = await read(tenant, lambda session: queries.invoices(session, tenant.id, {}, behind))
    assert [row.number for row in (first, *rest)] == [2, 1]
    final = {"state": "draft"}
    assert not await read(tenant, lambda session: queries.invoices(session, tenant.id, final, Part(1)))
    found = await read(tenant, lambda session: queries.invoice(session, tenant.id, first.id))
    assert found.total == "1.50"
    for identity in (first.id, uuid4()):
        with pytest.raises(InvoiceNotFound):
            await read(other, lambda session, each=identity: queries.invoice(session, other.id, each))  # type: ignore[misc]


async def test_a_list_of_drafts_is_computed_at_once_as_each_of_them_is(database: Database) -> None:
    """Of two months and two currencies, with an earlier invoice, a late row, a minimum and credits of its tenant alone."""
    prices = {"USD": Price(prompt=1_500_000, completion=7), "EUR": Price(prompt=2_000_000)}
    tenants = [await make_billed_tenant(database, f"tenant-{number}", prices) for number in range(3)]
    first, second = last_month().previous, last_month()
    for number, tenant in enumerate(tenants, start=1):
        await tenant.use(first.begin, number * 1_000_000, adapter_id=uuid4())
        await tenant.use(first.begin, number * 3_000_000, currency="EUR")
    await tenants[1].set_terms(minimum_micro=50_000_000, tax_rate_ppm=190_000)
    await operate(database, lambda uow: closing.grant_credit(uow, tenants[0].id, 400_000, "welcome"))
    await operate(database, lambda uow: closing.finalize(uow, tenants[2].id, first, now=now()))
    await tenants[2].use(first.begin, 9_000_000)
    await tenants[2].use(second.begin, 1, kind="correction", amount_pico=-5_000_000)
    for month, tenant, currency in product((first, second), tenants, prices):
        await operate(
            database,
            lambda uow, id=tenant.id, each=month, code=currency: closing.draft(uow, id, each, code, now()),  # type: ignore[misc]
        )

    statements: list[str] = []
    listen(database._engine.sync_engine, "before_cursor_execute", lambda *seen: statements.append(seen[2]))

    async def listed(limit: int) -> tuple[int, int]:
        """The number of drafts, and of statements."""
        statements.clear()
        async with database.as_operator() as session:
            month = {"month": str(second)}
            found = await queries.invoices_with_drafts(session, None, month, Part(limit + 1))
        return len(found[:limit]), len(statements)

    _, of_one = await listed(1)
    assert await listed(9) == (6, of_one)
    async with database.as_operator() as session:
        found = await queries.invoices_with_drafts(session, None, {"state": "draft"}, Part(21))
        totals = {row.id: row.total_micro for row in found}
        details = [await queries.invoice(session, None, row.id) for row in found]
    assert len(totals) == 11 and len(set(totals.values())) > 6
    assert totals == {each.id: each.total_micro for each in details}


async def test_credits_stand_in_the_order_in_which_they_pay(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    soon, later = now() + timedelta(days=40), now() + timedelta(days=400)

    async def grant(amount: int, reason: str, priority: int, expires_at: datetime | None = None) -> None:
        await operate(
            database,
            lambda uow: closing.grant_credit(
                uow, tenant.id, amount, reason, priority=priority, expires_at=expires_at
            ),
        )

    await grant(500_000, "used first", 1)
    await grant(9_000_000, "third", 50)
    await grant(9_000_000, "second, since it expires", 50, later)
    await grant(9_000_000, "ends before its month does", 2, soon)
    await tenant.use(last_month().begin, 1_000_000)
    await operate(database, lambda uow: closing.finalize(uow, tenant.id, last_month(), now=now()))
    found = await read(tenant, lambda session: queries.ranked_credits(session, tenant.id, soon))
    assert [(row.reason, row.place) for row in found] == [
        ("second, since it expires", 1),
        ("third", 2),
        ("ends before its month does", None),
        ("used first", None),
    ]
    assert [row.available_micro for row in found] == [9_000_000, 9_000_000, 8_000_000, 0]


async def test_alerts_are_crossed_budgets(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    async with database.as_writer() as session:
        for name, threshold in (("budget_per_month", 80), ("tokens_per_month", 80)):
            session.add(event(tenant.id, name, threshold))
    (alert,) = await read(tenant, lambda session: billing.alerts(session, tenant.id))
    assert (alert.period, alert.threshold, alert.used, alert.limit) == ("m:2026-01", 80, 8, 10)


def event(tenant_id: UUID, name: str, threshold: int) -> QuotaEvent:
    return QuotaEvent(
        id=uuid4(),
        tenant_id=tenant_id,
        level="tenant",
        subject_id=tenant_id,
        limit_name=name,
        period="m:2026-01",
        threshold=threshold,
        used=8,
        limit_value=10,
    )
