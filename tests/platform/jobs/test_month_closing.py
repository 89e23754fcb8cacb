"""Months are closed by any number of gateways at once; a tenant whose bill fails does not stop the others."""

import asyncio
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from structlog.testing import capture_logs
from tests.tenants.invoices.billed_tenant import make_billed_tenant

from loraplex.platform.jobs.month_closing import JUST_ENDED, RECHECK, MonthClosing
from loraplex.tenants.database import Database
from loraplex.tenants.invoices.content import compute_contents
from loraplex.tenants.invoices.invoices import InvoiceRepository
from loraplex.tenants.invoices.locks import lock_tenant
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.models import AuditEntry, Invoice

JANUARY = Month(2026, 1)
GRACE = timedelta(hours=24)


class Clock:
    def __init__(self, now: datetime) -> None:
        self.now = now

    async def __call__(self, session: AsyncSession) -> datetime:
        return self.now


def job(database: Database, clock: Clock) -> MonthClosing:
    return MonthClosing(database=database, grace=GRACE, clock=clock)


async def states(database: Database) -> list[tuple[str, str, str, int | None]]:
    async with database.as_operator() as session:
        rows = await session.scalars(
            select(Invoice).order_by(Invoice.month, Invoice.currency, Invoice.number)
        )
        return [(row.month, row.currency, row.state, row.number) for row in rows]


async def test_a_month_is_drafted_at_its_end_and_final_after_the_grace(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 10**6)
    clock = Clock(JANUARY.end - timedelta(microseconds=1))
    closing = job(database, clock)
    await closing.close()
    assert await states(database) == []
    clock.now = JANUARY.end
    await closing.close()
    assert await states(database) == [("2026-01", "USD", "draft", None)]
    # Usage that arrives in the grace is on the invoice.
    await tenant.use(JANUARY.begin, 10**6)
    clock.now = JANUARY.end + GRACE - timedelta(microseconds=1)
    await closing.close()
    assert await states(database) == [("2026-01", "USD", "draft", None)]
    clock.now = JANUARY.end + GRACE
    for _ in range(2):
        await closing.close()
    assert await states(database) == [("2026-01", "USD", "final", 1)]
    async with database.as_operator() as session:
        (invoice,) = await session.scalars(select(Invoice))
        entries = await session.scalars(select(AuditEntry).order_by(AuditEntry.id))
        assert [(each.action, each.actor) for each in entries] == [
            ("invoice.draft", "month closing"),
            ("invoice.finalize", "month closing"),
        ]
    assert invoice.total_micro == 3_000_000


async def test_several_gateways_at_once_make_one_invoice_per_tenant(database: Database) -> None:
    for number in range(4):
        tenant = await make_billed_tenant(database, f"tenant-{number}")
        await tenant.use(JANUARY.begin, 10**6)
    clock = Clock(JANUARY.end)
    closings = [job(database, clock) for _ in range(3)]
    await asyncio.gather(*(closing.close() for closing in closings))
    assert [state for _, _, state, _ in await states(database)] == ["draft"] * 4
    clock.now += GRACE
    await asyncio.gather(*(closing.close() for closing in closings))
    assert [number for _, _, _, number in await states(database)] == [1, 2, 3, 4]


async def test_a_failing_tenant_does_not_stop_the_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = [await make_billed_tenant(database, f"tenant-{number}") for number in range(3)]
    for tenant in tenants:
        await tenant.use(JANUARY.begin, 10**6)

    async def fail_for_one(session: Any, tenant_id: UUID, *rest: Any) -> Any:
        if tenant_id == tenants[1].id:
            raise ZeroDivisionError
        return await compute_contents(session, tenant_id, *rest)

    closing = job(database, Clock(JANUARY.end))
    with monkeypatch.context() as broken:
        broken.setattr("loraplex.platform.jobs.month_closing.compute_contents", fail_for_one)
        await closing.close()
    assert len(await states(database)) == 2
    await closing.close()
    assert len(await states(database)) == 3


async def test_an_unexpected_error_does_not_end_the_job(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 10**6)
    customers, calls = InvoiceRepository.customers, 0

    async def fail_once(repository: InvoiceRepository, month: Month) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        return await customers(repository, month)

    monkeypatch.setattr(InvoiceRepository, "customers", fail_once)
    monkeypatch.setattr("loraplex.platform.jobs.month_closing.PASS_S", 0.01)
    running = asyncio.create_task(job(database, Clock(JANUARY.end)).run())
    async with asyncio.timeout(60):
        while not running.done() and await states(database) == []:
            await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()


async def test_a_tenant_in_another_transaction_is_left_to_it(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 10**6)
    closing = job(database, Clock(JANUARY.end))
    async with database.as_operator() as session:
        await lock_tenant(session, tenant.id)
        await closing.close()
        assert await states(database) == []
    await closing.close()
    assert len(await states(database)) == 1


async def test_usage_that_arrives_after_the_grace_gets_an_invoice_with_a_grace_of_its_own(
    database: Database,
) -> None:
    tenant = await make_billed_tenant(database)
    clock = Clock(JANUARY.end + timedelta(days=3))
    closing = job(database, clock)
    await closing.close()
    await tenant.use(JANUARY.begin, 10**6)
    clock.now += RECHECK
    await closing.close()
    await closing.close()
    assert await states(database) == [("2026-01", "USD", "draft", None)]
    clock.now += GRACE
    await closing.close()
    assert await states(database) == [("2026-01", "USD", "final", 1)]


async def test_what_no_rate_card_priced_is_left_to_operators(database: Database) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 5, amount_pico=7, with_version=False)
    await job(database, Clock(JANUARY.end)).close()
    assert await states(database) == []


@pytest.mark.parametrize(("after", "drafted"), [(timedelta(0), 1), (JUST_ENDED, 0)])
async def test_a_minimum_agreed_later_does_not_reach_back(
    database: Database, after: timedelta, drafted: int
) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.set_terms(minimum_micro=5_000_000)
    await job(database, Clock(JANUARY.end + after)).close()
    assert len(await states(database)) == drafted


async def test_a_month_ends_by_the_databases_clock_and_waits_for_the_slowest_gateway(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers = [UsageLedger(database) for _ in range(2)]
    (wrong, exact), (wrong_id, exact_id) = ledgers, (uuid4(), uuid4())
    closing = MonthClosing(database=database, grace=GRACE)

    async def waited(behind: timedelta) -> timedelta:
        class Behind(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Any:
                return datetime.now(tz) - behind

        with monkeypatch.context() as late:
            late.setattr("loraplex.tenants.ledger.usage_ledger.datetime", Behind)
            await wrong.record_gateway(wrong_id, 60.0)
        await exact.record_gateway(exact_id, 60.0)
        async with database.as_operator() as session:
            return datetime.now(UTC) - await closing.clock(session)

    with capture_logs() as logs:
        assert timedelta(seconds=89) < await waited(timedelta(seconds=90)) < timedelta(seconds=100)
        assert logs == []
        # A host that starts in 1970 delays a month by a day, and names itself once.
        for _ in range(2):
            assert timedelta(hours=23) < await waited(timedelta(days=20_000)) < timedelta(hours=25)
        (line,) = logs
        assert line["log_level"] == "error" and line["gateway"] == str(wrong_id)
        assert await waited(timedelta(0)) < timedelta(seconds=5)
    for each in ledgers:
        await each.close()
