"""The usage of all tenants of some days, as operators see it: tokens and price by tenant.

Invariant: rows add up to the totals of their currency exactly.
"""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import names_of
from loraplex.tenants.ledger.usage_reports import UsageQuery, UsageSums, totals_of, usage_rows

__all__ = ["TenantUsage", "UsageOverview", "UsageSums", "usage_by_tenant"]

MAX_ROWS = 5000
"""Sums of a tenant and currency in one month: far more than a page shows, so that its totals are whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """What one tenant used in one currency."""

    tenant_id: UUID
    tenant: str
    currency: str
    sums: UsageSums


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageOverview:
    """Usage from `start` until `end`, exclusive: by tenant, the largest amount first, and in all by currency."""

    start: datetime
    end: datetime
    rows: tuple[TenantUsage, ...]
    totals: tuple[tuple[str, UsageSums], ...]


async def usage_by_tenant(session: AsyncSession, start: datetime, end: datetime) -> UsageOverview:
    """Sum up the usage of every tenant between two full hours, as an operator."""
    query = UsageQuery(tenant_id=None, start=start, end=end, bucket="1mo", group_by=frozenset({"tenant"}))
    found = await usage_rows(session, query, None, MAX_ROWS)
    sums: dict[tuple[UUID, str], UsageSums] = {}
    for row in found:
        key = row.key.tenant_id, row.currency
        sums[key] = sums.get(key, UsageSums()) + row.sums
    names = await names_of(session, {tenant_id for tenant_id, _ in sums})
    rows = [_usage(tenant_id, names, currency, each) for (tenant_id, currency), each in sums.items()]
    return UsageOverview(
        start=start,
        end=end,
        rows=tuple(sorted(rows, key=lambda row: (row.currency, -row.sums.amount_pico, row.tenant))),
        totals=tuple(totals_of(found).items()),
    )


def _usage(tenant_id: UUID, names: dict[UUID, str], currency: str, sums: UsageSums) -> TenantUsage:
    return TenantUsage(
        tenant_id=tenant_id, tenant=names.get(tenant_id, str(tenant_id)), currency=currency, sums=sums
    )
