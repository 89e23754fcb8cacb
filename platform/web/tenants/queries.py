"""Tenants as operators see them: a page of them with what they did in a day, and all that an operator sets for one."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts import queries as accounts
from loraplex.tenants.accounts.records import TenantAccountDocument
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.billing.records import TenantBillingDocument
from loraplex.tenants.billing.tenant_billing import TenantBillings
from loraplex.tenants.ledger.tenant_activity import TenantActivity, tenant_activity
from loraplex.tenants.pages import Slice
from loraplex.tenants.people.memberships import has_admin
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository, QuotaState

DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class ActiveTenant:
    """A tenant and what it did in the last 24 hours."""

    tenant: TenantAccountDocument
    activity: TenantActivity


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantDetail(ActiveTenant):
    """With its limits and its billing data; each part has the revision that a change of it names. `has_admin`: one has joined."""

    quotas: QuotaState
    billing: TenantBillingDocument
    has_admin: bool


async def tenants(session: AsyncSession, now: datetime, search: str, part: Slice[str]) -> list[ActiveTenant]:
    """Return living tenants by name, those whose names begin with `search`."""
    found = await accounts.tenants(session, part, search)
    activity = await tenant_activity(session, [each.id for each in found], now - DAY, now)
    return [ActiveTenant(each, activity[each.id]) for each in found]


async def tenant(session: AsyncSession, tenant_id: UUID, now: datetime) -> TenantDetail:
    """Return one tenant, also a deleted one. Raises `TenantNotFound`."""
    found = await accounts.tenant(session, tenant_id)
    activity = await tenant_activity(session, [tenant_id], now - DAY, now)
    return TenantDetail(
        tenant=found,
        activity=activity[tenant_id],
        quotas=await QuotaRepository(session, tenant_id).tenant(),
        billing=await TenantBillings(session).get(tenant_id),
        has_admin=await has_admin(session, tenant_id),
    )


async def tenant_billing(session: AsyncSession, tenant_id: UUID) -> TenantBillingDocument:
    """Return what the bills of a tenant show. Raises `TenantNotFound`."""
    found = await TenantRepository(session).by_id(tenant_id)
    return await TenantBillings(session).get(found.id)
