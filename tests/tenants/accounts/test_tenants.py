"""Tenants as accounts."""

import pytest
from sqlalchemy import text
from tests.tenants.listing_part import Part
from tests.tenants.registry_records import RegistryWriter

from loraplex.tenants.accounts.queries import tenants as tenant_list
from loraplex.tenants.accounts.records import TierChange
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, InvalidField, InvalidName, NameTaken, TenantNotFound


async def test_create_get_list(database: Database) -> None:
    async with database.as_operator() as session:
        tenants = TenantRepository(session)
        created = await tenants.create("zebra", weight=2.5)
        await tenants.create("acme")
        assert created.created_at is not None and created.weight == 2.5
        assert [tenant.name for tenant in await tenants.list()] == ["acme", "zebra"]
        assert (await tenants.get("zebra")).id == created.id


async def test_a_name_is_taken_once_and_the_transaction_goes_on(database: Database) -> None:
    async with database.as_operator() as session:
        tenants = TenantRepository(session)
        await tenants.create("acme")
        with pytest.raises(NameTaken):
            await tenants.create("acme")
        assert len(await tenants.list()) == 1


@pytest.mark.parametrize(
    "name", ["", "Acme", "-a", "a" * 64, "a b", "a\n", "ä", "a_b", "a;DROP TABLE tenants"]
)
async def test_names_that_are_refused(database: Database, name: str) -> None:
    async with database.as_operator() as session:
        with pytest.raises(InvalidName, match="lower-case"):
            await TenantRepository(session).create(name)


@pytest.mark.parametrize("weight", [0.0, -1.0, 1001.0, float("nan"), float("inf")])
async def test_weights_that_are_refused(database: Database, weight: float) -> None:
    async with database.as_operator() as session:
        with pytest.raises(InvalidField, match="weight"):
            await TenantRepository(session).create("acme", weight)


async def test_what_does_not_exist(database: Database) -> None:
    async with database.as_operator() as session:
        for name in ("nobody", "a\x00"):
            with pytest.raises(TenantNotFound):
                await TenantRepository(session).get(name)


async def test_pages_are_by_name(database: Database) -> None:
    async with database.as_operator() as session:
        tenants = TenantRepository(session)
        for name in ("c", "a", "d", "b"):
            await tenants.create(name)
        assert [tenant.name for tenant in await tenant_list(session, Part(None, 3))] == ["a", "b", "c"]
        assert [tenant.name for tenant in await tenant_list(session, Part("c", 3))] == ["d"]


async def test_tier_and_weight(database: Database) -> None:
    async with database.as_operator() as session:
        tenants = TenantRepository(session)
        tenant = await tenants.create("acme", tier="gold")
        epoch, revision = tenant.policy_epoch, tenant.revision
        await tenants.change_tier(tenant, TierChange(weight=3.0))
        assert (tenant.tier, tenant.weight) == ("gold", 3.0)
        assert tenant.policy_epoch > epoch and tenant.revision > revision
        for change in (TierChange(tier="Not allowed"), TierChange(weight=0.0)):
            with pytest.raises(InvalidField):
                await tenants.change_tier(tenant, change)


async def test_a_tenant_that_is_being_changed_takes_new_rows_and_no_other_change(database: Database) -> None:
    async with database.as_operator() as session:
        tenant_id = (await TenantRepository(session).create("acme")).id
    soon = text("SET LOCAL lock_timeout = '200ms'")
    async with database.as_operator() as changing:
        await TenantRepository(changing).living(tenant_id)
        async with database.as_tenant(tenant_id) as session:
            await session.execute(soon)
            await RegistryWriter(session, tenant_id).get_or_create("support")
        with pytest.raises(DatabaseUnavailable):
            async with database.as_operator() as session:
                await session.execute(soon)
                await TenantRepository(session).living(tenant_id)
