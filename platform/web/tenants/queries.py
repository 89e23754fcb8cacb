"""Tenants as operators see them: a page of them with what they did in a day, and all that an operator sets for one."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import MAX_WEIGHT, TenantRepository, TierChange
from loraplex.tenants.billing.tenant_billing import BillingData, TenantBillings
from loraplex.tenants.errors import TenantNotFound
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.ledger.tenant_activity import NearLimit, TenantActivity, tenant_activity
from loraplex.tenants.models import Tenant
from loraplex.tenants.models.billing import MAX_TAX_RATE_PPM
from loraplex.tenants.quotas.limits import MAXIMA, QuotaLimits
from loraplex.tenants.quotas.tenant_quotas import TenantQuotas

__all__ = [
    "MAXIMA",
    "MAX_TAX_RATE_PPM",
    "MAX_WEIGHT",
    "BillingData",
    "NearLimit",
    "QuotaLimits",
    "TenantDetail",
    "TenantPage",
    "TenantRow",
    "TierChange",
    "tenant",
    "tenant_id_of",
    "tenants",
]

DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRow:
    """One tenant and its last 24 hours. `spend_pico`: (currency, amount in pico-units). `near`: limits that are near.

    `state`: active, suspended, or deleted.
    """

    id: UUID
    name: str
    tier: str
    weight: float
    unknown_parameters: str
    state: str
    created_at: datetime
    suspended_at: datetime | None
    deleted_at: datetime | None
    revision: int
    adapters: int
    requests: int
    spend_pico: tuple[tuple[str, int], ...]
    near: tuple[NearLimit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPage:
    """Tenants by name. `following`: the name behind which the next page begins; None for the last."""

    rows: tuple[TenantRow, ...]
    following: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantDetail:
    """A tenant with its limits and its billing data, each with the revision that a change of it names."""

    row: TenantRow
    limits: QuotaLimits
    limits_revision: int
    billing: BillingData
    billing_revision: int


async def tenants(
    session: AsyncSession, now: datetime, search: str, after: str | None, limit: int
) -> TenantPage:
    """Read at most `limit` living tenants whose names begin with `search`, behind the name `after`."""
    found = await TenantRepository(session).page(after, limit + 1, prefix=search)
    shown = found[:limit]
    activity = await tenant_activity(session, [each.id for each in shown], now - DAY, now)
    rows = tuple(_row(each, activity[each.id]) for each in shown)
    return TenantPage(rows=rows, following=rows[-1].name if len(found) > limit else None)


async def tenant(session: AsyncSession, tenant_id: UUID, now: datetime) -> TenantDetail:
    """Read one tenant, also a deleted one. Raises `TenantNotFound`."""
    found = await TenantRepository(session).by_id(tenant_id)
    activity = await tenant_activity(session, [tenant_id], now - DAY, now)
    limits, limits_revision = await TenantQuotas(session).get(tenant_id)
    billing, billing_revision = await TenantBillings(session).get(tenant_id)
    return TenantDetail(
        row=_row(found, activity[tenant_id]),
        limits=limits,
        limits_revision=limits_revision,
        billing=billing,
        billing_revision=billing_revision,
    )


def tenant_id_of(text: str) -> UUID:
    """Read the id of a path. Raises `TenantNotFound`."""
    parsed = canonical_uuid(text)
    if parsed is None:
        raise TenantNotFound(f"no tenant {text[:80]!r}")
    return parsed


def _row(tenant: Tenant, activity: TenantActivity) -> TenantRow:
    state = "suspended" if tenant.suspended_at is not None else "active"
    return TenantRow(
        id=tenant.id,
        name=tenant.name,
        tier=tenant.tier,
        weight=tenant.weight,
        unknown_parameters=tenant.unknown_parameters,
        state=state if tenant.deleted_at is None else "deleted",
        created_at=tenant.created_at,
        suspended_at=tenant.suspended_at,
        deleted_at=tenant.deleted_at,
        revision=tenant.revision,
        adapters=activity.adapters,
        requests=activity.requests,
        spend_pico=tuple(activity.spend_pico.items()),
        near=tuple(activity.near),
    )
