"""The usage of all tenants of some days, as operators see it: tokens and price by tenant.

Invariant: rows add up to the totals of their currency exactly.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import names_of
from loraplex.tenants.ledger.usage_reports import UsageQuery, UsageRow, UsageSums, usage_rows, usage_totals

__all__ = ["TenantUsage", "UsageOverview", "UsageSums", "usage_by_tenant"]

ROWS_AT_ONCE = 5000
"""Sums of a tenant in one month that one statement reads."""


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
    totals = await usage_totals(session, query)
    sums: dict[tuple[UUID, str], UsageSums] = {}
    for currency in totals:
        async for row in _all_rows(session, replace(query, currency=currency)):
            key = row.key.tenant_id, currency
            sums[key] = sums.get(key, UsageSums()) + row.sums
    names = await names_of(session, {tenant_id for tenant_id, _ in sums})
    rows = [_usage(tenant_id, names, currency, each) for (tenant_id, currency), each in sums.items()]
    return UsageOverview(
        start=start,
        end=end,
        rows=tuple(sorted(rows, key=lambda row: (row.currency, -row.sums.amount_pico, row.tenant))),
        totals=tuple(totals.items()),
    )


async def _all_rows(session: AsyncSession, query: UsageQuery) -> AsyncIterator[UsageRow]:
    """All rows of a report in one currency: a cursor names no currency."""
    rows = await usage_rows(session, query, None, ROWS_AT_ONCE)
    while rows:
        for row in rows:
            yield row
        whole = len(rows) < ROWS_AT_ONCE
        rows = [] if whole else await usage_rows(session, query, rows[-1].key, ROWS_AT_ONCE)


def _usage(tenant_id: UUID, names: dict[UUID, str], currency: str, sums: UsageSums) -> TenantUsage:
    return TenantUsage(
        tenant_id=tenant_id, tenant=names.get(tenant_id, str(tenant_id)), currency=currency, sums=sums
    )
