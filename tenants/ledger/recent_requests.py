"""How many requests adapters, keys and versions had lately. Invariant: hourly rollups answer for adapters and keys; for versions,
which no rollup names, a bounded number of the ledger's newest rows does.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.ids import uuid7_from

SAMPLED: Final = 5_000
"""The most rows of the ledger that a summary of versions reads, of a tenant or of an alias."""
_COLUMNS: Final = {"adapter": "adapter_id", "key": "api_key_id"}
_BY_VERSION: Final = text("""
WITH sampled AS MATERIALIZED (
    SELECT adapter_id, adapter_version, outcome, completion_tokens, ttft_ms, admitted_at FROM usage_records
    WHERE tenant_id = :tenant_id AND id >= :since AND kind = 'usage' ORDER BY id DESC LIMIT :limit
)
SELECT adapter_version, count(*), count(*) FILTER (WHERE outcome IN ('failed', 'unknown')),
    percentile_disc(0.5) WITHIN GROUP (ORDER BY ttft_ms), sum(completion_tokens), max(admitted_at),
    (SELECT count(*) FROM sampled)
FROM sampled WHERE adapter_id = :adapter_id AND adapter_version IS NOT NULL GROUP BY adapter_version
""")
_BY_ALIAS: Final = text("""
SELECT w.alias, s.adapter_version, count(*), count(*) FILTER (WHERE s.outcome IN ('failed', 'unknown')),
    percentile_disc(0.5) WITHIN GROUP (ORDER BY s.ttft_ms), sum(s.completion_tokens), max(s.admitted_at)
FROM unnest(CAST(:aliases AS text[]), CAST(:since AS timestamptz[])) AS w (alias, since) CROSS JOIN LATERAL (
    SELECT adapter_version, outcome, completion_tokens, ttft_ms, admitted_at FROM usage_records
    WHERE tenant_id = :tenant_id AND adapter_id = :adapter_id AND alias = w.alias AND settled_at >= w.since
        AND admitted_at >= w.since AND id >= :first_id AND kind = 'usage' ORDER BY settled_at DESC LIMIT :limit
) AS s WHERE s.adapter_version IS NOT NULL GROUP BY w.alias, s.adapter_version
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionUse:
    """The sampled requests of one version, the last of them at `last_at`. `ttft_ms`: the median time to the first token, None where no request had one."""

    requests: int
    failed: int
    ttft_ms: int | None
    completion_tokens: int
    last_at: datetime


@dataclass(frozen=True, slots=True)
class VersionUses:
    """`is_partial`: there are more requests in the time than the sample holds."""

    by_version: Mapping[int, VersionUse]
    is_partial: bool


async def hourly_requests(
    session: AsyncSession,
    tenant_id: UUID,
    dimension: Literal["adapter", "key"],
    ids: Collection[UUID],
    since: datetime,
) -> dict[UUID, dict[datetime, int]]:
    """The requests, refused ones too, of these adapters or keys by hour (UTC) from the hour `since` on; hours without any are
    absent.
    """
    column = _COLUMNS[dimension]
    statement = text(f"""
        SELECT {column}, hour, sum(requests) FROM request_rollups
        WHERE tenant_id = :tenant_id AND hour >= :since AND {column} = ANY(:ids) GROUP BY {column}, hour""")
    found: dict[UUID, dict[datetime, int]] = {each: {} for each in ids}
    values = {"tenant_id": tenant_id, "since": since, "ids": [*ids]}
    for identity, hour, requests in await session.execute(statement, values):
        found[identity][hour] = int(requests)
    return found


async def version_uses(
    session: AsyncSession, tenant_id: UUID, adapter_id: UUID, since: datetime
) -> VersionUses:
    """Sum up the adapter's requests by version: those among the tenant's `SAMPLED` newest since a time."""
    values = {"tenant_id": tenant_id, "adapter_id": adapter_id, "since": uuid7_from(since), "limit": SAMPLED}
    rows = (await session.execute(_BY_VERSION, values)).all()
    uses = {version: _use(figures) for version, *figures, _ in rows}
    return VersionUses(uses, is_partial=any(row[-1] >= SAMPLED for row in rows))


async def alias_uses(
    session: AsyncSession, tenant_id: UUID, adapter_id: UUID, since: Mapping[str, datetime]
) -> dict[str, VersionUses]:
    """Sum up by version the requests that came by each alias since its time: the `SAMPLED` newest of each."""
    found: dict[str, dict[int, VersionUse]] = {alias: {} for alias in since}
    if since:
        values = {"tenant_id": tenant_id, "adapter_id": adapter_id, "limit": SAMPLED}
        # Ids follow the time of admission: without a bound for them every month is read.
        values |= {
            "aliases": [*since],
            "since": [*since.values()],
            "first_id": uuid7_from(min(since.values())),
        }
        for alias, version, *figures in await session.execute(_BY_ALIAS, values):
            found[alias][version] = _use(figures)
    return {
        alias: VersionUses(uses, is_partial=sum(each.requests for each in uses.values()) >= SAMPLED)
        for alias, uses in found.items()
    }


def _use(figures: Sequence[Any]) -> VersionUse:
    requests, failed, ttft_ms, completion_tokens, last_at = figures
    return VersionUse(
        requests=requests,
        failed=failed,
        ttft_ms=ttft_ms,
        completion_tokens=int(completion_tokens),
        last_at=last_at,
    )
