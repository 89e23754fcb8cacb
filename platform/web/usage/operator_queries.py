"""The usage of all tenants of some days, as operators see it: tokens and price by tenant.

Invariant: rows add up to the totals of their currency exactly, and the rollups are read once.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.ledger.usage_reports import TenantUsage, UsageSums, usage_of_tenants
from loraplex.tenants.periods import period_end, periods_of


@dataclass(frozen=True, slots=True)
class UsageOverview:
    """Usage by tenant, the largest amount first, and in all by currency."""

    rows: list[TenantUsage]
    totals: list[tuple[str, UsageSums]]


async def usage_by_tenant(
    session: AsyncSession, start: datetime, end: datetime, now: datetime
) -> UsageOverview:
    """Sum up the usage of every tenant from one full hour until another, exclusive, as an operator.

    Nothing is used after `now`: until then, its month is read as a whole one.
    """
    until = end if end <= now else max(end, period_end(periods_of(now).month))
    rows = await usage_of_tenants(session, start, until)
    totals: dict[str, UsageSums] = {}
    for row in rows:
        totals[row.currency] = totals.get(row.currency, UsageSums()) + row.sums
    rows.sort(key=lambda row: (row.currency, -row.sums.amount_pico, row.tenant))
    return UsageOverview(rows, sorted(totals.items()))
