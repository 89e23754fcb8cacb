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
from loraplex.tenants.quotas.limits import QuotaLimits, Subject

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


async def replay(
    session: AsyncSession, tenant_id: UUID, of: Subject, draft: Draft, now: datetime
) -> ReplayedDraft:
    """Replay a draft over the requests of `DAYS` days, today included. Raises `ReplayTooSlow`."""
    start = datetime.combine(now.date(), time(), now.tzinfo) - timedelta(days=DAYS - 1)
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
