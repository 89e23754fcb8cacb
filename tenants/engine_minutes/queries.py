"""Reads the minutes of engines, as an operator."""

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.engine_minutes.records import EngineMinute
from loraplex.tenants.models import EngineMinuteRow


async def engine_minutes(
    session: AsyncSession, since: datetime
) -> Mapping[tuple[str, str], Mapping[datetime, EngineMinute]]:
    """Return the minutes from `since` on, by the host and the address of the engine."""
    found: dict[tuple[str, str], dict[datetime, EngineMinute]] = defaultdict(dict)
    query = select(EngineMinuteRow).where(EngineMinuteRow.minute >= since).order_by(EngineMinuteRow.minute)
    for row in await session.scalars(query):
        seen, own = EngineMinute.model_validate(row), found[row.host, row.address]
        own[seen.minute] = own[seen.minute].joined(seen) if seen.minute in own else seen
    return found
