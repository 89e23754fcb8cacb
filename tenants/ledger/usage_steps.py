"""What the requests of a tenant, a key with those that it binds, or an adapter used, in steps of ten seconds, to replay limits.

Invariant: a reading is bounded in rows and in time, and its steps come in parts, so that it never blocks others for long.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
from sqlalchemy import TextClause, or_, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import ReplayTooSlow
from loraplex.tenants.ids import CLOCKS_APART, uuid7_from
from loraplex.tenants.ledger.statements import AMOUNT_NANO
from loraplex.tenants.models import ApiKey, UsageTotal
from loraplex.tenants.periods import periods_of
from loraplex.tenants.quotas.limits import Level, Subject

STEP: Final = timedelta(seconds=10)
"""A minute's sum could not tell a burst, which a bucket refuses, from as many requests that come evenly."""
MAX_ROWS: Final = 100_000
MAX_MILLISECONDS: Final = 5_000
PART: Final = 250
"""Steps at once: replaying them takes about 3 ms of the event loop, and requests run before the next ones."""
BELOW: Final = """
WITH RECURSIVE below (id, is_root) AS (
    SELECT k.id, coalesce(k.limit_root, k.id) = k.id FROM api_keys k WHERE k.id = :subject_id
    UNION ALL SELECT k.id, b.is_root FROM api_keys k JOIN below b ON k.parent_id = b.id WHERE b.is_root
) SELECT id FROM below
"""
"""The key, and unless another one binds it, all keys below: they would share its limits, also if it has none yet."""
_OF: Final[dict[Level, str]] = {
    "tenant": "",
    "key": f"AND r.api_key_id IN ({BELOW})",
    "adapter": "AND r.adapter_id = :subject_id",
}
_RUNNING: Final = """
    SELECT at, tokens, amount, running > :running AS is_crowded FROM (
        SELECT at, tokens, amount, change, sum(change) OVER (ORDER BY at, change ROWS UNBOUNDED PRECEDING) AS running FROM (
            SELECT at, tokens, amount, 1 AS change FROM recent
            UNION ALL SELECT at + coalesce(duration_ms, 0) * INTERVAL '1 millisecond', 0, 0, -1 FROM recent
        ) changes
    ) counted WHERE change = 1"""
_BOUND: Final = text("SELECT set_config('statement_timeout', :milliseconds, true)")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageStep:
    """The requests that were admitted in the `STEP` from `start` on. `crowded`: those that found too many others running."""

    start: datetime
    requests: int
    tokens: int
    amount_nano: int
    crowded: int = 0


@dataclass(frozen=True, slots=True)
class PeriodUse:
    """What a subject used of one day or month."""

    tokens: int = 0
    amount_nano: int = 0


async def usage_steps(
    session: AsyncSession, tenant_id: UUID, subject: Subject, start: datetime, most_running: int | None
) -> AsyncIterator[Sequence[UsageStep]]:
    """The steps since `start`, oldest first, of at most the `MAX_ROWS` newest requests. `most_running`: so many may run once
    a request came; a further one is crowded. None: no request is.

    Raises `ReplayTooSlow` if the rows are not read within `MAX_MILLISECONDS`.
    """
    await session.execute(_BOUND, {"milliseconds": str(MAX_MILLISECONDS)})
    values: dict[str, Any] = (
        {
            "tenant_id": tenant_id,
            "first": uuid7_from(start - CLOCKS_APART),
            "start": start,
            "step": STEP,
            "most": MAX_ROWS,
        }
        | ({} if most_running is None else {"running": most_running})
        | ({} if subject.level == "tenant" else {"subject_id": subject.id})
    )
    try:
        rows = await session.stream(_statement(subject.level, crowded=most_running is not None), values)
        async for part in rows.partitions(PART):
            yield [
                UsageStep(
                    start=at, requests=requests, tokens=int(tokens), amount_nano=int(nano), crowded=crowded
                )
                for at, requests, tokens, nano, crowded in part
            ]
    except OperationalError as error:
        if isinstance(error.orig, psycopg.errors.QueryCanceled):
            raise ReplayTooSlow("there are too many requests to replay limits over them now") from error
        raise


async def use_before(
    session: AsyncSession, tenant_id: UUID, subject: Subject, start: datetime, now: datetime
) -> dict[str, PeriodUse]:
    """What the subject had used of the month of `start` when that day began: its total, less those of the days since."""
    month, days, day = periods_of(start).month, set[str](), start
    while day <= now and periods_of(day).month == month:
        days.add(periods_of(day).day)
        day += timedelta(days=1)
    below = text(BELOW).bindparams(subject_id=subject.id).columns(ApiKey.id)
    query = select(UsageTotal.period, UsageTotal.tokens, UsageTotal.amount_nano).where(
        UsageTotal.tenant_id == tenant_id,
        UsageTotal.level == subject.level,
        or_(
            UsageTotal.subject_id == subject.id,
            UsageTotal.subject_id.in_(below),
        ),
        UsageTotal.period.in_({month, *days}),
    )
    tokens = amount = 0
    for period, used_tokens, used_amount in await session.execute(query):
        sign = 1 if period == month else -1
        tokens, amount = tokens + sign * used_tokens, amount + sign * used_amount
    return {month: PeriodUse(tokens, amount)}


def _statement(level: Level, *, crowded: bool) -> TextClause:
    """One row per step. A request runs for its duration; one of an unknown duration for no time."""
    source = _RUNNING if crowded else "SELECT at, tokens, amount, false AS is_crowded FROM recent"
    return text(f"""
WITH recent AS MATERIALIZED (
    SELECT r.admitted_at AS at, r.uncached_tokens + r.cached_tokens + r.completion_tokens AS tokens, {AMOUNT_NANO} AS amount,
        r.duration_ms
    FROM usage_records r WHERE r.tenant_id = :tenant_id AND r.id >= :first AND r.kind = 'usage' {_OF[level]}
    ORDER BY r.id DESC LIMIT :most
), admitted AS ({source})
SELECT date_bin(:step, at, TIMESTAMPTZ '1970-01-01Z') AS start, count(*), sum(tokens), sum(amount),
    count(*) FILTER (WHERE is_crowded)
FROM admitted WHERE at >= :start GROUP BY 1 ORDER BY 1
""")
