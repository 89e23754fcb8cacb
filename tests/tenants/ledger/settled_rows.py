"""Rows of the ledger for tests: reservations and usage to settle, and whether all sums agree with the rows."""

import random
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import text
from tests.tenants.billing.fixed_prices import fixed_version

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.database import Database
from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.models import NO_ID
from loraplex.tenants.periods import periods_of
from loraplex.tenants.quotas.reservation import Reservation, ReservationRequest, SettledUsage

AT = datetime(2026, 11, 30, 23, 59, 59, 999_000, tzinfo=UTC)
ADAPTER, KEY = UUID(int=7), UUID(int=8)
PRICE = fixed_version(Price(prompt=100, cached_prompt=50, completion=120))
ROLLUPS = """
    SELECT tenant_id, hour, adapter_id, api_key_id, price_version_id, currency, requests, uncached_tokens, cached_tokens,
        completion_tokens, amount_pico, reasoning_tokens FROM usage_rollups ORDER BY 1, 2, 3, 4
"""
SUMS = """
    SELECT tenant_id, date_trunc('hour', admitted_at, 'UTC'), coalesce(adapter_id, :no_id), api_key_id,
        coalesce(price_version_id, :no_id), currency, count(*), sum(uncached_tokens)::bigint, sum(cached_tokens)::bigint,
        sum(completion_tokens)::bigint, sum(amount_pico), sum(reasoning_tokens)::bigint
    FROM usage_records GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4
"""
MONTHS = """
    SELECT tenant_id, month, adapter_id, price_version_id, currency, requests, uncached_tokens, cached_tokens,
        completion_tokens, amount_pico, reasoning_tokens FROM monthly_rollups ORDER BY 1, 2, 3, 4, 5
"""
MONTH_SUMS = """
    SELECT tenant_id, date_trunc('month', admitted_at, 'UTC'), coalesce(adapter_id, :no_id), coalesce(price_version_id, :no_id),
        currency, count(*), sum(uncached_tokens)::bigint, sum(cached_tokens)::bigint, sum(completion_tokens)::bigint,
        sum(amount_pico), sum(reasoning_tokens)::bigint
    FROM usage_records GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
"""
TOTALS = (
    "SELECT tenant_id, subject_id, period, requests, tokens, amount_nano FROM usage_totals ORDER BY 1, 2, 3"
)
TOTAL_SUMS = """
    SELECT tenant_id, s.subject_id, p.period, count(*), sum(uncached_tokens + cached_tokens + completion_tokens)::bigint,
        sum((amount_pico + 999) / 1000)::bigint
    FROM usage_records CROSS JOIN LATERAL (VALUES (tenant_id), (api_key_id), (adapter_id)) s (subject_id)
    CROSS JOIN LATERAL (VALUES (day), (month)) p (period) WHERE s.subject_id IS NOT NULL GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""


def reservation(
    tenant_id: UUID, at: datetime = AT, *, key: UUID = KEY, adapter: UUID | None = ADAPTER
) -> Reservation:
    periods = periods_of(at)
    request = ReservationRequest(
        id=UUID(int=uuid7_from(at).int | random.getrandbits(60)),
        tenant_id=tenant_id,
        api_key_id=key,
        adapter_id=adapter,
        request_id="client-1",
        prompt_tokens=10,
        completion_tokens=10,
    )
    return Reservation(request=request, day=periods.day, month=periods.month, admitted_at=at, price=PRICE)


def usage(
    prompt: int = 10, cached: int = 4, completion: int = 5, amount: int = 1001, reasoning: int = 0
) -> SettledUsage:
    return SettledUsage(
        outcome="completed",
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        reasoning_tokens=reasoning,
        amount_pico=amount,
    )


async def read(database: Database, query: str, **parameters: object) -> list[tuple[Any, ...]]:
    async with database.as_operator() as session:
        return [tuple(row) for row in await session.execute(text(query), parameters)]


async def check_sums(database: Database) -> None:
    """Rollups of hours and months, and totals, are the sums of the rows."""
    assert await read(database, ROLLUPS) == await read(database, SUMS, no_id=NO_ID)
    assert await read(database, MONTHS) == await read(database, MONTH_SUMS, no_id=NO_ID)
    assert await read(database, TOTALS) == await read(database, TOTAL_SUMS)
