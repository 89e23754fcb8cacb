"""The adapters of all tenants by what they did lately, for an operator.

Invariant: only the rows of the time that is asked for are read, by the ledger's primary key, whose ids begin with it.
"""

from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.ledger.request_reports import FAILED
from loraplex.tenants.records import Record

ADAPTER_ORDERS: Final = {"ttft": "ttft_p95_ms"} | {name: name for name in ("errors", "requests", "tokens")}
"""By what adapters are ranked -> the column of it."""
_BUSIEST: Final = """
SELECT r.tenant_id, t.name AS tenant, r.adapter_id, a.name AS adapter, count(*) AS requests,
    count(*) FILTER (WHERE r.outcome = ANY(:failed)) AS errors,
    sum(r.uncached_tokens + r.cached_tokens + r.completion_tokens)::bigint AS tokens,
    percentile_disc(0.5) WITHIN GROUP (ORDER BY r.ttft_ms) AS ttft_p50_ms,
    percentile_disc(0.95) WITHIN GROUP (ORDER BY r.ttft_ms) AS ttft_p95_ms
FROM usage_records r JOIN tenants t ON t.id = r.tenant_id LEFT JOIN adapters a ON a.id = r.adapter_id
WHERE r.id >= :first_id AND r.kind = 'usage'
GROUP BY r.tenant_id, t.name, r.adapter_id, a.name
ORDER BY {order} DESC NULLS LAST, requests DESC, r.tenant_id, r.adapter_id LIMIT :limit"""


class BusyAdapter(Record):
    """One adapter's finished requests of the asked time. `adapter_id` is null for a tenant's requests to the base model, `adapter`
    for these and where it was erased. `errors`: those that were admitted and failed. Times to the first token in milliseconds, null
    where no request had one.
    """

    tenant_id: UUID
    tenant: str
    adapter_id: UUID | None
    adapter: str | None
    requests: int
    errors: int
    tokens: int
    ttft_p50_ms: int | None
    ttft_p95_ms: int | None


async def busiest_adapters(
    session: AsyncSession, order: str, time: timedelta, limit: int
) -> list[BusyAdapter]:
    """Return the first `limit` adapters by one of `ADAPTER_ORDERS`, of requests admitted in the last `time`, as an operator."""
    found = await session.execute(
        text(_BUSIEST.format(order=ADAPTER_ORDERS[order])),
        {"failed": list(FAILED), "first_id": uuid7_from(datetime.now(UTC) - time), "limit": limit},
    )
    return [BusyAdapter.model_validate(row) for row in found]
