"""What a draft of limits would have refused in the last days, of a tenant, a key or an adapter.

Invariant: a replay reads and changes no limit, and is bounded as `tenants/ledger/usage_steps.py` says.
"""

from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Final, TypeAlias
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.admission.replay import Replay, ReplayedLimit
from loraplex.tenants.ledger import usage_steps
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository, QuotaState
from loraplex.tenants.quotas.limits import QuotaLimits

DAYS: Final = 7
Draft: TypeAlias = QuotaLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedDraft:
    """What a draft would have refused. `requests`: those that were replayed, from `since` on; `is_whole`: these are all of
    `DAYS` days, today included. `limits` count requests that other limits refuse too.
    """

    since: datetime
    is_whole: bool
    requests: int
    refused: int
    first: datetime | None
    limits: tuple[ReplayedLimit, ...]


@dataclass(frozen=True, slots=True)
class ReplaySubject:
    """Whose requests are replayed: the state of its limits, with its name as people know it."""

    state: QuotaState
    name: str


async def subject(session: AsyncSession, tenant_id: UUID, level: str, name: str) -> ReplaySubject:
    """Find a tenant, a key by its public id, or an adapter by its name. Raises `KeyNotFound`, `AdapterNotFound`."""
    repository = QuotaRepository(session, tenant_id)
    if level == "key":
        state = await repository.key(name)
        return ReplaySubject(state, (await repository.key_names([name]))[name])
    state = await repository.adapter(name) if level == "adapter" else await repository.tenant()
    return ReplaySubject(state, state.name)


async def replay(
    session: AsyncSession, tenant_id: UUID, found: ReplaySubject, draft: Draft, now: datetime
) -> ReplayedDraft:
    """Replay a draft over the requests of `DAYS` days, today included. Raises `ReplayTooSlow`."""
    start = datetime.combine(now.date(), time(), now.tzinfo) - timedelta(days=DAYS - 1)
    of = found.state.subject
    replayed = Replay(draft, await usage_steps.use_before(session, tenant_id, of, start, now))
    running = draft.concurrent_requests
    async for steps in usage_steps.usage_steps(session, tenant_id, of, start, running):
        for step in steps:
            replayed.add(step)
    is_whole = replayed.requests < usage_steps.MAX_ROWS
    return ReplayedDraft(
        since=start if is_whole else replayed.since or start,
        is_whole=is_whole,
        requests=replayed.requests,
        refused=replayed.refused,
        first=replayed.first,
        limits=tuple(replayed.limits),
    )
