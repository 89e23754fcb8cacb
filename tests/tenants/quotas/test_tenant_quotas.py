"""The limits of a whole tenant: none without a row, changed by name, bounded."""

import pytest
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.quotas.limits import NO_LIMITS, QuotaLimits
from loraplex.tenants.quotas.tenant_quotas import TenantQuotas


async def test_limits_are_changed_by_name_and_counted(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_operator() as session:
        assert await TenantQuotas(session).get(tenant_id) == (NO_LIMITS, 1)
        epoch = (await TenantRepository(session).by_id(tenant_id)).policy_epoch
    async with database.as_operator() as session:
        quotas = TenantQuotas(session)
        row = await quotas.locked(tenant_id)
        assert row.revision == 1
        await quotas.change(row, {"tokens_per_day": 7, "max_keys": 3})
        assert row.revision == 2
    async with database.as_operator() as session:
        quotas = TenantQuotas(session)
        assert await quotas.get(tenant_id) == (QuotaLimits(tokens_per_day=7, max_keys=3), 2)
        row = await quotas.locked(tenant_id)
        assert await quotas.change(row, {"tokens_per_day": None}) == QuotaLimits(max_keys=3)
        assert await quotas.get(tenant_id) == (QuotaLimits(max_keys=3), 3)
        assert (await TenantRepository(session).by_id(tenant_id)).policy_epoch > epoch


@pytest.mark.parametrize(
    "change", [{"max_keys": -1}, {"requests_per_minute": 100_000_001}, {"tokens_per_day": 2**53}]
)
async def test_numbers_out_of_bounds_are_refused_by_name(database: Database, change: dict[str, int]) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_operator() as session:
        quotas = TenantQuotas(session)
        with pytest.raises(InvalidField, match=next(iter(change))):
            await quotas.change(await quotas.locked(tenant_id), change)
