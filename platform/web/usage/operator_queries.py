"""The usage of all tenants of some days, as operators see it: tokens and price by tenant.

Invariant: rows add up to the totals of their currency exactly, and the rollups are read once.
"""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.ledger.usage_reports import UsageSums, usage_of_tenants
from loraplex.tenants.quotas.periods import period_end, periods_of

__all__ = ["TenantUsage", "UsageOverview", "UsageSums", "usage_by_tenant"]


@dataclass(frozen=True, slots=True)
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


async def usage_by_tenant(
    session: AsyncSession, start: datetime, end: datetime, now: datetime
) -> UsageOverview:
    """Sum up the usage of every tenant between two full hours, as an operator.

    Nothing is used after `now`: until then, its month is read as a whole one.
    """
    until = end if end <= now else max(end, period_end(periods_of(now).month))
    rows = [TenantUsage(*row) for row in await usage_of_tenants(session, start, until)]
    totals: dict[str, UsageSums] = {}
    for row in rows:
        totals[row.currency] = totals.get(row.currency, UsageSums()) + row.sums
    return UsageOverview(
        start=start,
        end=end,
        rows=tuple(sorted(rows, key=lambda row: (row.currency, -row.sums.amount_pico, row.tenant))),
        totals=tuple(sorted(totals.items())),
    )
