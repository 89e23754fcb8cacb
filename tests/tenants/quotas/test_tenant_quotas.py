"""The limits of a whole tenant: none without a row, changed by name, bounded."""

from uuid import UUID

import pytest
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.quotas import use_cases as quotas
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository
from loraplex.tenants.quotas.limits import NO_LIMITS, QuotaLimits
from loraplex.tenants.unit_of_work import unit_of_work


async def read(database: Database, tenant_id: UUID) -> tuple[QuotaLimits, int]:
    """The limits and their revision."""
    async with database.as_operator() as session:
        state = await QuotaRepository(session, tenant_id).tenant()
    return state.limits, state.revision


async def change(database: Database, tenant_id: UUID, limits: dict[str, int | None]) -> int:
    """Change limits; return their revision."""
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        return (await quotas.change(uow, tenant_id, limits)).revision


async def test_limits_are_changed_by_name_and_counted(database: Database) -> None:
    tenant_id = await make_tenant(database)
    assert await read(database, tenant_id) == (NO_LIMITS, 1)
    async with database.as_operator() as session:
        epoch = (await TenantRepository(session).by_id(tenant_id)).policy_epoch
    assert await change(database, tenant_id, {"tokens_per_day": 7, "max_keys": 3}) == 2
    assert await read(database, tenant_id) == (QuotaLimits(tokens_per_day=7, max_keys=3), 2)
    assert await change(database, tenant_id, {"tokens_per_day": None}) == 3
    assert await read(database, tenant_id) == (QuotaLimits(max_keys=3), 3)
    async with database.as_operator() as session:
        assert (await TenantRepository(session).by_id(tenant_id)).policy_epoch > epoch


@pytest.mark.parametrize(
    "limits", [{"max_keys": -1}, {"requests_per_minute": 100_000_001}, {"tokens_per_day": 2**53}]
)
async def test_numbers_out_of_bounds_are_refused_by_name(
    database: Database, limits: dict[str, int | None]
) -> None:
    tenant_id = await make_tenant(database)
    with pytest.raises(InvalidField, match=next(iter(limits))):
        await change(database, tenant_id, limits)
