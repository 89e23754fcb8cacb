"""Guards in the database: set with a split, read with its alias, and counted as requests are settled.

Invariant: a request is counted once, in the first count after it was settled, which is at least `SETTLED` old by then.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy import func, select, text, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.canaries.records import BOUNDS, GuardBounds, GuardDocument
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.models import AdapterAlias, AliasGuard

SETTLED: Final = timedelta(seconds=5)
"""A settlement begins at `settled_at` and is seen when it is committed: one that takes longer is not counted."""
LONGEST: Final = timedelta(minutes=10)
"""The most of settled time that one count reads: after an outage the next ones follow at once."""
SKEW: Final = timedelta(minutes=1)
"""By which the clock in a request's id may be behind."""
MAX_DUE: Final = 1000

DUE: Final = text("""
SELECT g.tenant_id, g.adapter_id, g.alias, g.generation
FROM alias_guards g JOIN adapter_aliases USING (adapter_id, alias, generation)
JOIN adapter_versions v ON v.adapter_id = g.adapter_id AND v.version = g.baseline AND v.state = 'ready'
ORDER BY g.counted_until LIMIT :limit
""")
COUNT: Final = text("""
WITH settled AS (
    SELECT adapter_version = :canary AS canary, outcome = 'failed' AND NOT unsatisfied AS failed, unsatisfied, ttft_ms,
        lag(adapter_version) OVER before AS version_before, lag(ttft_ms) OVER before AS ttft_before
    FROM usage_records
    WHERE tenant_id = :tenant_id AND adapter_id = :adapter_id AND alias = :alias AND settled_at > :since
        AND settled_at <= :until AND admitted_at >= :began_at AND id >= :first_id AND kind = 'usage'
        AND adapter_version IN (:baseline, :canary) AND outcome IN ('completed', 'failed')
    WINDOW before AS (ORDER BY admitted_at, id)
)
SELECT count(*) FILTER (WHERE canary) AS canary_requests, count(*) FILTER (WHERE canary AND failed) AS canary_failed,
    count(*) FILTER (WHERE canary AND NOT failed) AS canary_answered,
    count(*) FILTER (WHERE canary AND unsatisfied) AS canary_unsatisfied,
    count(*) FILTER (WHERE NOT canary) AS baseline_requests,
    count(*) FILTER (WHERE NOT canary AND failed) AS baseline_failed,
    count(*) FILTER (WHERE NOT canary AND unsatisfied) AS baseline_unsatisfied,
    count(*) FILTER (WHERE canary AND version_before = :baseline AND ttft_ms + ttft_before >= 0) AS ttft_pairs,
    count(*) FILTER (WHERE canary AND version_before = :baseline AND ttft_ms > :ratio * ttft_before) AS ttft_slower
FROM settled
""")


class GuardedAlias(NamedTuple):
    """What names a guard."""

    tenant_id: UUID
    adapter_id: UUID
    alias: str
    generation: int


def check_guard(bounds: GuardBounds, targets: Mapping[int, int], former: Sequence[int]) -> GuardBounds:
    """Return the bounds with their baseline: the first of `former` in the split, if they name none.

    Raises `InvalidField`.
    """
    if all(getattr(bounds, name) is None for name in BOUNDS):
        raise InvalidField("guard", f"guard must have at least one of {', '.join(BOUNDS)}")
    if len(targets) != 2:
        raise InvalidField("guard", "guard needs a `split` of exactly two versions: baseline and canary")
    baseline = bounds.baseline or next((version for version in former if version in targets), None)
    if baseline not in targets:
        raise InvalidField(
            "guard.baseline",
            f"guard.baseline must be a version of the split: {' or '.join(map(str, sorted(targets)))}",
        )
    return bounds.model_copy(update={"baseline": baseline})


class GuardRepository:
    """The guards that one session sees."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def set(self, place: GuardedAlias, bounds: GuardBounds, targets: Mapping[int, int]) -> None:
        """Set the guard of a generation that begins now, as `check_guard` has returned it."""
        canary = next(version for version in targets if version != bounds.baseline)
        begun = {
            **bounds.model_dump(),
            "generation": place.generation,
            "canary": canary,
            "canary_weight": targets[canary],
            "began_at": func.now(),
            "counted_until": func.now(),
            "counts": {},
        }
        statement = insert(AliasGuard).values({**place._asdict(), **begun})
        await self._session.execute(statement.on_conflict_do_update(constraint="pk_alias_guards", set_=begun))

    async def of(self, aliases: Sequence[AdapterAlias]) -> dict[str, GuardDocument]:
        """The guards of one adapter's aliases, by their names."""
        wanted = [(each.adapter_id, each.alias, each.generation) for each in aliases]
        key = tuple_(AliasGuard.adapter_id, AliasGuard.alias, AliasGuard.generation)
        query = select(AliasGuard).where(key.in_(wanted)).execution_options(populate_existing=True)
        return {row.alias: GuardDocument.model_validate(row) for row in await self._session.scalars(query)}

    async def due(self) -> list[GuardedAlias]:
        """The guards in force whose baseline is ready, those counted longest ago first; for an operator's session."""
        return [GuardedAlias(*row) for row in await self._session.execute(DUE, {"limit": MAX_DUE})]

    async def count(self, place: GuardedAlias) -> GuardDocument | None:
        """Count what was settled since the last count; None if another gateway does, or the guard is no more.

        A canary's request at the border of two counts is in no pair.
        """
        query = select(AliasGuard).filter_by(**place._asdict()).with_for_update(skip_locked=True)
        guard = (await self._session.scalars(query)).one_or_none()
        if guard is None:
            return None
        now = (await self._session.execute(select(func.now()))).scalar_one()
        until = min(now - SETTLED, guard.counted_until + LONGEST)
        if until > guard.counted_until:
            values = {
                **place._asdict(),
                "canary": guard.canary,
                "baseline": guard.baseline,
                "ratio": guard.max_ttft_ratio or 1.0,
                "since": guard.counted_until,
                "until": until,
                "began_at": guard.began_at,
                "first_id": uuid7_from(guard.began_at - SKEW),
            }
            row = (await self._session.execute(COUNT, values)).one()
            guard.counts = dict(Counter(guard.counts) + Counter(row._asdict()))
            guard.counted_until = until
            await self._session.flush()
        return GuardDocument.model_validate(guard)
