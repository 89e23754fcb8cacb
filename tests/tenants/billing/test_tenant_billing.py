"""The billing data of a tenant: defaults, changes, and a currency that changes at a month's begin only."""

from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.billing.records import TenantBillingDocument
from loraplex.tenants.billing.tenant_billing import TenantBillings, currency_of, next_month
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InUse
from loraplex.tenants.models import TenantBilling


@pytest.fixture
async def tenant_id(database: Database) -> UUID:
    async with database.as_operator() as session:
        await RateCards(session).create_first("USD", Price(prompt=1))
    return await make_tenant(database)


async def change(database: Database, tenant_id: UUID, **fields: Any) -> TenantBillingDocument:
    async with database.as_operator() as session:
        billings = TenantBillings(session)
        return await billings.change(await billings.locked(tenant_id), fields)


def billing(revision: int, **fields: Any) -> TenantBillingDocument:
    """The defaults of a tenant with these fields."""
    texts = dict.fromkeys(TenantBillingDocument.model_fields)
    numbers = {"tax_rate_ppm": 0, "minimum_micro": 0, "revision": revision}
    return TenantBillingDocument.model_validate({**texts, **numbers, **fields})


async def note_use(database: Database, tenant_id: UUID) -> None:
    async with database.as_writer() as session:
        await session.execute(
            text(
                "INSERT INTO usage_totals (tenant_id, level, subject_id, period, requests, tokens, amount_nano)"
                " VALUES (:id, 'tenant', :id, 'd:2026-01-01', 1, 1, 1)"
            ),
            {"id": tenant_id},
        )


async def test_a_tenant_without_a_row_has_the_defaults(database: Database, tenant_id: UUID) -> None:
    async with database.as_operator() as session:
        assert await TenantBillings(session).get(tenant_id) == billing(1, currency="USD")


async def test_fields_change_alone_and_raise_the_revision(database: Database, tenant_id: UUID) -> None:
    await change(database, tenant_id, issuer="loraplex Ltd\n1 Street", tax_rate_ppm=190_000)
    assert await change(database, tenant_id, vat_id="DE1", tax_rate_ppm=0) == billing(
        3, currency="USD", issuer="loraplex Ltd\n1 Street", vat_id="DE1"
    )
    async with database.as_tenant(tenant_id) as session:
        data = await TenantBillings(session).get(tenant_id)
    # Made, then changed twice.
    assert (data.vat_id, data.revision) == ("DE1", 3)


async def test_a_tenant_that_was_never_used_gets_its_currency_at_once(
    database: Database, tenant_id: UUID
) -> None:
    assert await change(database, tenant_id, currency="EUR") == billing(2, currency="EUR")


async def test_a_used_tenant_changes_its_currency_with_the_next_month(
    database: Database, tenant_id: UUID
) -> None:
    await note_use(database, tenant_id)
    expected = {next_month(datetime.now(UTC))}
    changed = await change(database, tenant_id, currency="EUR")
    expected.add(next_month(datetime.now(UTC) + timedelta(seconds=2)))
    assert (changed.currency, changed.next_currency) == ("USD", "EUR")
    assert changed.next_currency_from in expected
    # Another one replaces it, and the present one ends it.
    assert (await change(database, tenant_id, currency="GBP")).next_currency == "GBP"
    assert await change(database, tenant_id, currency="USD") == billing(4, currency="USD")


@pytest.mark.parametrize("trace", ["reservation", "key"])
async def test_an_open_request_or_a_used_key_counts_as_use(
    database: Database, tenant_id: UUID, trace: str
) -> None:
    statements = {
        "reservation": "INSERT INTO reservations (id, tenant_id, api_key_id, gateway_id, prompt_tokens,"
        " completion_tokens, amount_nano, day, month, expires_at) VALUES (gen_random_uuid(), :id, :id, :id, 1, 1, 1,"
        " 'd:2026-01-01', 'm:2026-01', now())",
        "key": "INSERT INTO api_keys (id, tenant_id, key_id, environment, name, secret_sha256, scopes, last_used_at)"
        " VALUES (gen_random_uuid(), :id, 'k', 'live', 'k', decode(repeat('00', 32), 'hex'), '{}', now())",
    }
    async with database.as_operator() as session:
        await session.execute(text("RESET ROLE"))
        await session.execute(text(statements[trace]), {"id": tenant_id})
    assert (await change(database, tenant_id, currency="EUR")).next_currency == "EUR"


async def test_a_change_that_has_begun_is_the_present_currency(database: Database, tenant_id: UUID) -> None:
    await note_use(database, tenant_id)
    await change(database, tenant_id, currency="EUR")
    async with database.as_operator() as session:
        row = await session.get(TenantBilling, tenant_id)
        assert row is not None
        row.next_currency_from = date(2026, 1, 1)
    async with database.as_operator() as session:
        assert await TenantBillings(session).get(tenant_id) == billing(3, currency="EUR")
    changed = await change(database, tenant_id, currency="USD")
    assert (changed.currency, changed.next_currency) == ("EUR", "USD")


async def test_the_former_currency_is_kept_while_its_last_month_is_billed(
    database: Database, tenant_id: UUID
) -> None:
    await note_use(database, tenant_id)
    await change(database, tenant_id, currency="EUR")
    begun = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    async with database.as_operator() as session:
        row = await session.get(TenantBilling, tenant_id)
        assert row is not None
        row.next_currency_from = begun.date()
    assert await change(database, tenant_id, currency="EUR") == billing(4, currency="EUR")
    with pytest.raises(InUse, match="can be changed again from"):
        await change(database, tenant_id, currency="GBP")
    async with database.as_operator() as session:
        row = await session.get(TenantBilling, tenant_id)
        assert row is not None
        assert currency_of(row, "USD").at(begun - timedelta(seconds=1)) == "USD"


@pytest.mark.parametrize(
    ("now", "begins"),
    [
        ("2026-11-30T23:59:59+00:00", "2026-12-01"),
        ("2026-12-01T00:00:00+00:00", "2027-01-01"),
        ("2027-01-31T23:59:59+00:00", "2027-02-01"),
        ("2026-12-01T00:30:00+02:00", "2026-12-01"),
    ],
)
def test_months_begin_in_utc(now: str, begins: str) -> None:
    assert next_month(datetime.fromisoformat(now)) == date.fromisoformat(begins)
