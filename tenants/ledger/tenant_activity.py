"""What tenants did in the last hours and how near they are to their limits, for operators: set-wise, for a page of tenants.

Invariant: use is what is settled; counters in Valkey may be ahead of it by the requests in progress.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import Adapter, UsageRollup
from loraplex.tenants.periods import periods_of

NEAR_PERCENT: Final = 80
"""A limit is near from this share of it on."""
_NEAR: Final = text(f"""
    SELECT u.tenant_id, l.name, div(l.used * 100, l.bound)::bigint
    FROM usage_totals u
    JOIN quotas q ON q.tenant_id = u.tenant_id AND q.api_key_id IS NULL AND q.adapter_id IS NULL
    CROSS JOIN LATERAL (VALUES
        ('tokens_per_day', 'd', u.tokens::numeric, q.tokens_per_day::numeric),
        ('tokens_per_month', 'm', u.tokens, q.tokens_per_month),
        ('budget_per_day', 'd', u.amount_nano, q.budget_per_day::numeric * 1000),
        ('budget_per_month', 'm', u.amount_nano, q.budget_per_month::numeric * 1000)
    ) l (name, kind, used, bound)
    WHERE u.tenant_id = ANY(:ids) AND u.level = 'tenant' AND u.subject_id = u.tenant_id AND u.period IN (:day, :month)
        AND l.kind = left(u.period, 1) AND l.bound > 0 AND l.used * 100 >= l.bound * {NEAR_PERCENT}
    ORDER BY u.tenant_id, 3 DESC, l.name""")


@dataclass(frozen=True, slots=True)
class NearLimit:
    """A limit of a tenant and how much of it is used, in whole percent."""

    name: str
    percent: int


@dataclass(slots=True, kw_only=True)
class TenantActivity:
    """`spend_pico`: the amounts by currency, in pico-units. `near`: the limits that are near, the nearest first."""

    adapters: int = 0
    requests: int = 0
    spend_pico: dict[str, int] = field(default_factory=dict)
    near: list[NearLimit] = field(default_factory=list)


async def tenant_activity(
    session: AsyncSession, ids: Collection[UUID], since: datetime, now: datetime
) -> dict[UUID, TenantActivity]:
    """Read the activity of these tenants since the full hour that follows `since`, as an operator."""
    found = {tenant_id: TenantActivity() for tenant_id in ids}
    of_tenants = select(Adapter.tenant_id, func.count()).where(Adapter.tenant_id.in_(ids))
    living = of_tenants.where(Adapter.deleted_at.is_(None)).group_by(Adapter.tenant_id)
    for tenant_id, adapters in await session.execute(living):
        found[tenant_id].adapters = adapters
    group = (UsageRollup.tenant_id, UsageRollup.currency)
    used = (
        select(*group, func.sum(UsageRollup.requests), func.sum(UsageRollup.amount_pico))
        .where(UsageRollup.tenant_id.in_(ids), UsageRollup.hour >= since)
        .group_by(*group)
        .order_by(*group)
    )
    for tenant_id, currency, requests, amount_pico in await session.execute(used):
        found[tenant_id].requests += int(requests)
        found[tenant_id].spend_pico[currency] = int(amount_pico)
    periods = periods_of(now)
    parameters = {"ids": [*ids], "day": periods.day, "month": periods.month}
    for tenant_id, name, percent in await session.execute(_NEAR, parameters):
        found[tenant_id].near.append(NearLimit(name, percent))
    return found
