"""Final invoices are compared with the rollups: late usage and voided invoices are no drift, a changed line is one."""

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pytest
from tests.tenants.invoices.billed_tenant import BilledTenant, make_billed_tenant

from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.ledger.drift import ComparedRange, Comparison, compare
from loraplex.tenants.unit_of_work import unit_of_work

MONTH = Month.of(datetime.now(UTC))
BEFORE = Month.of(MONTH.begin - timedelta(days=1))
PART = ComparedRange(compared="invoices", start=BEFORE.begin, end=BEFORE.end)
LATER = MONTH.end + timedelta(days=40)


@pytest.fixture
async def tenant(database: Database) -> BilledTenant:
    """With usage of the last month: of two adapters, a correction, and usage from before rate cards."""
    made = await make_billed_tenant(database)
    for adapter_id in (None, uuid4()):
        await made.use(BEFORE.begin, 10**6, 7, 3, adapter_id=adapter_id)
    await made.use(BEFORE.begin, -5, 0, 0, kind="correction")
    await made.use(BEFORE.begin, 11, with_version=False, amount_pico=999)
    return made


async def finalize(tenant: BilledTenant, month: Month = BEFORE) -> UUID:
    async with unit_of_work(tenant.database, system_actor("test"), None, None) as uow:
        return (await invoices.finalize(uow, tenant.id, month, now=LATER)).id


async def found(tenant: BilledTenant) -> Comparison:
    """Compare, once ids have the times of admission, as those of gateways do."""
    with psycopg.connect(tenant.database.url) as connection:
        connection.execute("SET session_replication_role = replica")
        for identity, at in connection.execute("SELECT id, admitted_at FROM usage_records").fetchall():
            timed = UUID(int=uuid7_from(at).int | identity.int & (1 << 62) - 1)
            connection.execute("UPDATE usage_records SET id = %s WHERE id = %s", [timed, identity])
    async with tenant.database.as_operator() as session:
        return await compare(session, PART)


def plant(tenant: BilledTenant, statement: str) -> None:
    """Past every trigger."""
    with psycopg.connect(tenant.database.url) as connection:
        connection.execute("SET session_replication_role = replica")
        assert connection.execute(statement.encode()).rowcount > 0


async def test_without_a_final_invoice_nothing_is_compared(tenant: BilledTenant) -> None:
    assert (await found(tenant)).sums == 0


async def test_an_invoice_has_what_was_used(tenant: BilledTenant) -> None:
    await finalize(tenant)
    comparison = await found(tenant)
    assert (comparison.sums, comparison.differing, comparison.drift_pico) == (3, 0, 0)


async def test_a_changed_line_is_found_and_named(tenant: BilledTenant) -> None:
    await finalize(tenant)
    plant(tenant, "UPDATE invoices SET finalized_at = finalized_at + interval '10 minutes'")
    plant(
        tenant,
        "UPDATE invoice_lines SET amount_pico = amount_pico + 6000001, tokens = tokens + 1, amount_micro = amount_micro + 6"
        " WHERE token_class = 'completion' AND adapter_id IS NULL",
    )
    comparison = await found(tenant)
    assert (comparison.differing, comparison.drift_pico) == (1, 6_000_001)
    (named,) = comparison.named
    assert named.startswith(f"tenant {tenant.id}, {BEFORE} ")
    assert named.endswith(": tokens +1, amount_pico +6000001")
    assert str(tenant.versions["USD"]) in named


async def test_usage_that_arrives_late_is_no_drift_before_or_after_it_is_billed(tenant: BilledTenant) -> None:
    await finalize(tenant)
    plant(tenant, "UPDATE invoices SET finalized_at = finalized_at - interval '10 minutes'")
    plant(tenant, "UPDATE usage_records SET settled_at = settled_at - interval '20 minutes'")
    await tenant.use(BEFORE.begin, 4, 4, 4)
    await tenant.use(BEFORE.begin, 1, adapter_id=uuid4())
    assert (await found(tenant)).differing == 0
    await finalize(tenant, MONTH)
    comparison = await found(tenant)
    assert (comparison.sums, comparison.differing) == (4, 0)


async def test_usage_that_is_lost_to_the_rollups_after_the_invoice_is_drift(tenant: BilledTenant) -> None:
    await finalize(tenant)
    plant(tenant, "UPDATE usage_records SET settled_at = settled_at - interval '20 minutes'")
    plant(tenant, "UPDATE monthly_rollups SET amount_pico = amount_pico - 999 WHERE amount_pico = 999")
    comparison = await found(tenant)
    assert (comparison.differing, comparison.drift_pico) == (1, 999)


async def test_rows_settled_around_an_invoice_may_be_on_it_or_not(tenant: BilledTenant) -> None:
    await finalize(tenant)
    await tenant.use(BEFORE.begin, 4, 4, 4)
    assert (await found(tenant)).differing == 0
    plant(
        tenant,
        "UPDATE monthly_rollups SET amount_pico = amount_pico + 10000000000000 WHERE amount_pico > 999",
    )
    comparison = await found(tenant)
    assert comparison.differing == 2, "more than all such rows together"


async def test_a_voided_invoice_is_not_compared_until_it_is_made_again(tenant: BilledTenant) -> None:
    invoice_id = await finalize(tenant)
    async with unit_of_work(tenant.database, system_actor("test"), None, None) as uow:
        await invoices.void(uow, invoice_id)
    assert (await found(tenant)).sums == 0
    await finalize(tenant)
    comparison = await found(tenant)
    assert (comparison.sums, comparison.differing) == (3, 0)
