"""A closed month while everything about it happens at once: invoices, late rows, a correction, and a credit that two invoices want.

One of each wins, and the ledger's rows, the lines of invoices, credits and their balance have the same sums.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from tests.platform.web.invoices.test_invoices import (
    FEBRUARY,
    JANUARY,
    MARCH,
    NOW,
    available,
    grant,
    shown,
)
from tests.tenants.invoices.billed_tenant import BilledTenant, make_billed_tenant
from tests.tenants.ledger.settled_rows import read, reservation, usage

from loraplex.tenants.actors import system_actor
from loraplex.tenants.billing.pricing import PriceVersion
from loraplex.tenants.database import Database
from loraplex.tenants.errors import AlreadyCorrected, InvoiceStateForbids, NothingToBill
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.invoices.invoices import InvoiceDetails
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.records import InvoiceDocument
from loraplex.tenants.invoices.rows import export_invoice
from loraplex.tenants.invoices.verification import verify_export
from loraplex.tenants.ledger import use_cases as usage_corrections
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.quotas.reservation import Reservation
from loraplex.tenants.unit_of_work import UnitOfWork, unit_of_work
from loraplex.tenants.usage.records import CorrectionDocument

ROUNDS: Final = 8
SPREAD_S: Final = 0.02
CREDIT: Final = 2_000_000
"""In micro-units: less than what either month costs, so that each of the two invoices wants all of it."""
TOKENS: Final = 1_000_000
SUMS: Final = """
    SELECT to_char({at}, 'YYYY-MM'), sum(uncached_tokens + cached_tokens + completion_tokens)::bigint, sum(amount_pico)::bigint
    FROM {table} WHERE tenant_id = :tenant GROUP BY 1 ORDER BY 1
"""
ROWS: Final = SUMS.format(at="admitted_at AT TIME ZONE 'UTC'", table="usage_records")
ROLLUPS: Final = SUMS.format(at="month AT TIME ZONE 'UTC'", table="monthly_rollups")
UNBALANCED: Final = "SELECT transaction_id FROM credit_entries GROUP BY 1 HAVING sum(amount_micro) <> 0"
ACCOUNTS: Final = """
    SELECT account, sum(amount_micro)::bigint FROM credit_entries WHERE tenant_id = :tenant GROUP BY 1 ORDER BY 1
"""


@dataclass(frozen=True)
class Race:
    """Runs works at once, each with a transaction that is open before the first of them begins."""

    database: Database
    chance: random.Random

    async def run(self, works: Sequence[Callable[[UnitOfWork], Awaitable[Any]]]) -> list[Any]:
        """The answers of the works, or what they raised."""
        barrier = asyncio.Barrier(len(works))

        async def one(work: Callable[[UnitOfWork], Awaitable[Any]], after_s: float) -> Any:
            async with unit_of_work(self.database, system_actor("race"), None, None) as uow:
                await uow.session.execute(text("SELECT 1"))
                await barrier.wait()
                await asyncio.sleep(after_s)
                return await work(uow)

        delays = [self.chance.choice([0.0, self.chance.uniform(0, SPREAD_S)]) for _ in works]
        running = [one(work, delay) for work, delay in zip(works, delays, strict=True)]
        return await asyncio.gather(*running, return_exceptions=True)


def row(tenant: BilledTenant, at: datetime) -> Reservation:
    """A request of a closed month that its gateway settles with the tenant's price."""
    version = tenant.versions["USD"]
    priced = PriceVersion(id=version, currency="USD", price=tenant.prices[version])
    return replace(reservation(tenant.id, at, adapter=None), price=priced)


async def settle(ledger: UsageLedger, settled: Reservation, tokens: int) -> bool:
    amount = settled.price.price.amount_pico(tokens, tokens // 4, tokens // 8)
    used = usage(prompt=tokens, cached=tokens // 4, completion=tokens // 8, amount=amount)
    return (await ledger.settle(settled, used)).written


def finalizes(tenant: BilledTenant, month: Month) -> Callable[[UnitOfWork], Coroutine[Any, Any, UUID]]:
    async def finalize(uow: UnitOfWork) -> UUID:
        return (await invoices.finalize(uow, tenant.id, month, now=NOW)).id

    return finalize


async def close_the_rest(database: Database, tenant: BilledTenant, chance: random.Random) -> list[UUID]:
    """What was left by the race is on the next invoice."""
    (last,) = await Race(database, chance).run([finalizes(tenant, MARCH)])
    if isinstance(last, NothingToBill):
        return []
    assert isinstance(last, UUID), last
    return [last]


async def check_money(
    database: Database, tenant: BilledTenant, granted: int, found: list[InvoiceDetails]
) -> None:
    """Rows, rollups, lines, credits and balance have the same sums."""
    billed: dict[str, tuple[int, int]] = {}
    for line in (line for invoice in found for line in invoice.content.totals.lines):
        tokens, pico = billed.get(str(line.month), (0, 0))
        billed[str(line.month)] = (tokens + line.tokens, pico + line.amount_pico)
    used = {month: (tokens, pico) for month, tokens, pico in await read(database, ROWS, tenant=tenant.id)}
    rolled = {
        month: (tokens, pico) for month, tokens, pico in await read(database, ROLLUPS, tenant=tenant.id)
    }
    assert billed == used == rolled
    consumed = sum(use.amount_micro for invoice in found for use in invoice.content.totals.credit_uses)
    left = await available(tenant)
    assert consumed + left == granted
    accounts = {"available": left, "consumed": consumed, "issued": -granted}
    assert {
        name: int(amount) for name, amount in await read(database, ACCOUNTS, tenant=tenant.id)
    } == accounts
    assert await read(database, UNBALANCED) == []
    for invoice in found:
        totals = invoice.content.totals
        assert sum(line.amount_micro for line in totals.lines) == totals.subtotal_micro
        assert totals.total_micro == totals.subtotal_micro - totals.credits_micro + totals.rounding_micro


async def race_about_a_month(database: Database, number: int, folder: Path) -> list[int]:
    """One round with a tenant of its own; the numbers of its invoices."""
    chance = random.Random(number)
    tenant = await make_billed_tenant(database, f"tenant-{number}")
    gateways = [UsageLedger(database) for _ in range(2)]
    wrong, late = row(tenant, JANUARY.begin), row(tenant, JANUARY.begin)
    for settled in (
        wrong,
        row(tenant, JANUARY.begin),
        row(tenant, FEBRUARY.begin),
        row(tenant, FEBRUARY.begin),
    ):
        assert await settle(gateways[0], settled, TOKENS)
    await grant(tenant, CREDIT)

    async def correct(uow: UnitOfWork) -> CorrectionDocument:
        return await usage_corrections.reverse(uow, wrong.id, "counted twice")

    async def add_credit(uow: UnitOfWork) -> None:
        await invoices.grant_credit(uow, tenant.id, CREDIT, "sorry")

    def ships(gateway: UsageLedger) -> Callable[[UnitOfWork], Coroutine[Any, Any, bool]]:
        return lambda _: settle(gateway, late, TOKENS // 2)

    january, february = finalizes(tenant, JANUARY), finalizes(tenant, FEBRUARY)
    works = [january, february, january, february, correct, correct, add_credit, *map(ships, gateways)]
    answers = await Race(database, chance).run(works)
    for gateway in gateways:
        await gateway.close()
    failed = [each for each in answers if isinstance(each, BaseException)]
    assert {type(each) for each in failed} <= {AlreadyCorrected, NothingToBill}, failed
    # Where February's invoice was first, it has billed January, and January has nothing left but what came late.
    of_january = {each for each in (answers[0], answers[2]) if isinstance(each, UUID)}
    (of_february,) = {answers[1], answers[3]}
    assert len(of_january) <= 1 and isinstance(of_february, UUID)
    assert sorted(type(each).__name__ for each in answers[4:6]) == ["AlreadyCorrected", "CorrectionDocument"]
    assert sorted(answers[7:]) == [False, True]
    billed = [*of_january, of_february, *await close_the_rest(database, tenant, chance)]
    found = [await shown(database, identity) for identity in billed]
    await check_money(database, tenant, 2 * CREDIT, found)
    for invoice in found:
        async with database.as_operator() as session:
            await export_invoice(session, invoice.id, folder / str(invoice.id))
        assert verify_export(folder / str(invoice.id)) == []
    return [invoice.number or 0 for invoice in found]


async def test_of_all_that_happens_at_once_to_a_closed_month_one_of_each_wins(
    database_url: str, tmp_path: Path
) -> None:
    database = Database(database_url, pool_size=16)
    try:
        numbers = [
            each for number in range(ROUNDS) for each in await race_about_a_month(database, number, tmp_path)
        ]
    finally:
        await database.close()
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


async def test_a_payment_and_a_cancellation_at_once_are_one_of_both(database_url: str) -> None:
    """A void invoice is billed again by the next one, with its credit; a paid one keeps both."""
    database, won = Database(database_url, pool_size=16), set()
    try:
        for number in range(ROUNDS):
            chance = random.Random(number)
            tenant = await make_billed_tenant(database, f"tenant-{number}")
            ledger = UsageLedger(database)
            await settle(ledger, row(tenant, JANUARY.begin), TOKENS)
            await ledger.close()
            await grant(tenant, CREDIT)
            (invoice_id,) = await Race(database, chance).run([finalizes(tenant, JANUARY)])

            async def pay(uow: UnitOfWork, identity: UUID = invoice_id) -> InvoiceDocument:
                return await invoices.pay(uow, identity, "SEPA 1")

            async def void(uow: UnitOfWork, identity: UUID = invoice_id) -> InvoiceDocument:
                return await invoices.void(uow, identity)

            again = finalizes(tenant, JANUARY)
            paid, cancelled, finalized = await Race(database, chance).run([pay, void, again])
            states = [isinstance(each, InvoiceStateForbids) for each in (paid, cancelled)]
            assert sorted(states) == [False, True]
            assert isinstance(finalized, UUID)
            state = (await shown(database, invoice_id)).state
            assert state == ("paid" if states[1] else "void")
            won.add(state)
            (living,) = await Race(database, chance).run([again])
            assert (living == invoice_id) == (state == "paid")
            await check_money(database, tenant, CREDIT, [await shown(database, living)])
    finally:
        await database.close()
    assert won == {"paid", "void"}, "the rounds do not try both orders"
