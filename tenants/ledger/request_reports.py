"""A tenant's requests by time and adapter: counts by outcome and times to the first token, from the hourly rollups.

Invariant: rows of the ledger are never read, and an answer is bounded, however many adapters and keys there are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.ledger.failed_requests import REFUSED_PREFIX
from loraplex.tenants.ledger.histograms import BUCKETS, EMPTY, TTFT_BOUNDS_MS, quantile
from loraplex.tenants.models import NO_ID
from loraplex.tenants.models.usage import REST

LIMITED: Final = ("rate_limit_exceeded", "insufficient_quota")
"""The error codes of requests that a limit refused."""
FAILED: Final = ("failed", "unknown")
"""Outcomes of admitted requests that count as errors; a client that went away is none."""
_SUMMED: Final = (
    "requests",
    "failed",
    "refused",
    "limited",
    *(f"ttft_{place}" for place in range(1, BUCKETS + 1)),
)
_COUNTS: Final = f"""
    sum(r.requests) AS requests, coalesce(sum(r.requests) FILTER (WHERE r.status = ANY(:failed)), 0) AS failed,
    coalesce(sum(r.requests) FILTER (WHERE r.status LIKE '{REFUSED_PREFIX}%'), 0) AS refused,
    coalesce(sum(r.requests) FILTER (WHERE r.status = ANY(:limited)), 0) AS limited,
    {", ".join(f"sum(r.ttft_buckets[{place}]) AS ttft_{place}" for place in range(1, BUCKETS + 1))}"""
_IN_RANGE: Final = "r.tenant_id = :tenant_id AND r.hour >= :start AND r.hour < :end"
# Past the named adapters, all are one row: `adapter_id` is that of no adapter.
_BY_ADAPTER: Final = text(f"""
WITH summed AS MATERIALIZED (
    SELECT date_bin(:step, r.hour, :start) AS start, r.adapter_id, {_COUNTS} FROM request_rollups r
    WHERE {_IN_RANGE} GROUP BY 1, 2
), named AS (
    SELECT s.adapter_id, a.name FROM summed s LEFT JOIN adapters a ON a.id = s.adapter_id WHERE s.start >= :ranked_from
    GROUP BY 1, 2 ORDER BY sum(s.requests) DESC, s.adapter_id LIMIT :named
)
SELECT s.start, coalesce(n.adapter_id, '{REST}'::uuid) AS adapter_id, n.name,
    {", ".join(f"sum(s.{name})" for name in _SUMMED)}
FROM summed s LEFT JOIN named n ON n.adapter_id = s.adapter_id GROUP BY 1, 2, 3 ORDER BY 1, 2""")
_OF_ADAPTER: Final = text(f"""
SELECT {_COUNTS} FROM request_rollups r WHERE {_IN_RANGE} AND r.adapter_id = :adapter_id HAVING count(*) > 0""")
# The newest of each kind: a flood of one kind hides no other. The table is bounded for each tenant.
_FAILURES: Final = text("""
SELECT (array_agg(f.id ORDER BY f.id DESC))[1] AS id, max(f.at) AS at, f.code, f.status,
    (array_agg(f.message ORDER BY f.id DESC))[1] AS message, coalesce(a.name, f.model) AS model, k.name AS key_name,
    sum(1 + f.omitted) AS requests
FROM failed_requests f LEFT JOIN adapters a ON a.id = f.adapter_id LEFT JOIN api_keys k ON k.key_id = f.key_id
WHERE f.tenant_id = :tenant_id AND f.at >= :since GROUP BY f.code, f.status, 6, f.key_id, k.name ORDER BY 1 DESC LIMIT :limit
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSums:
    """Counts of requests. `failed` were admitted, `refused` were not; `limited` is the part of these that a limit refused.

    `ttft` counts the times to the first token by `TTFT_BOUNDS_MS`.
    """

    requests: int = 0
    failed: int = 0
    refused: int = 0
    limited: int = 0
    ttft: tuple[int, ...] = EMPTY

    @property
    def errors(self) -> int:
        """Requests that failed or were refused."""
        return self.failed + self.refused

    def ttft_ms(self, percent: int) -> int | None:
        """That percentile of the times to the first token, within the precision of the buckets; None without any."""
        return quantile(TTFT_BOUNDS_MS, self.ttft, percent)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """The sums of one adapter from `start` on. `adapter_id`: `NO_ID` for the base model, `REST` for all that are not named.

    `adapter`: its name; None for both of these, and for an adapter that was erased.
    """

    start: datetime
    adapter_id: UUID
    adapter: str | None
    sums: RequestSums


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRow:
    """Requests of the last day for one model and of one key that failed, or were refused, alike. `id`, `at`, `message`: of the newest.

    `model` is None where it is not known, and `key_name` where the key was erased.
    """

    id: UUID
    at: datetime
    code: str
    status: int
    message: str
    model: str | None
    key_name: str | None
    requests: int


async def requests_by_adapter(
    session: AsyncSession,
    tenant_id: UUID,
    *,
    start: datetime,
    end: datetime,
    step: timedelta,
    ranked_from: datetime,
    named: int,
) -> list[RequestRow]:
    """The sums of each `step` between two whole hours, by adapter. Named are the adapters with the most requests from
    `ranked_from` on.
    """
    times = {"start": start, "end": end, "step": step, "ranked_from": ranked_from}
    found = await session.execute(_BY_ADAPTER, {**_parameters(tenant_id), **times, "named": named})
    return [RequestRow(start=row[0], adapter_id=row[1], adapter=row[2], sums=_sums(row[3:])) for row in found]


async def requests_of_adapter(
    session: AsyncSession, tenant_id: UUID, adapter_id: UUID | None, start: datetime, end: datetime
) -> RequestSums:
    """The sums of one adapter, or of the base model for None, between two whole hours."""
    of = {"adapter_id": adapter_id or NO_ID, "start": start, "end": end}
    found = (await session.execute(_OF_ADAPTER, {**_parameters(tenant_id), **of})).one_or_none()
    return RequestSums() if found is None else _sums(found)


async def latest_failures(
    session: AsyncSession, tenant_id: UUID, since: datetime, limit: int
) -> list[FailureRow]:
    """What failed and what was refused since then, in the last day at most, the latest first."""
    values = {"tenant_id": tenant_id, "since": since, "limit": limit}
    return [FailureRow(**row._mapping) for row in await session.execute(_FAILURES, values)]


def total(sums: Iterable[RequestSums]) -> RequestSums:
    """The sum of all of them."""
    every = tuple(sums)
    return RequestSums(
        requests=sum(each.requests for each in every),
        failed=sum(each.failed for each in every),
        refused=sum(each.refused for each in every),
        limited=sum(each.limited for each in every),
        ttft=tuple(map(sum, zip(*(each.ttft for each in every), strict=True))) if every else EMPTY,
    )


def _parameters(tenant_id: UUID) -> dict[str, Any]:
    limited = [REFUSED_PREFIX + code for code in LIMITED]
    return {"tenant_id": tenant_id, "failed": list(FAILED), "limited": limited}


def _sums(values: Sequence[Any]) -> RequestSums:
    requests, failed, refused, limited, *ttft = map(int, values)
    return RequestSums(requests=requests, failed=failed, refused=refused, limited=limited, ttft=tuple(ttft))
