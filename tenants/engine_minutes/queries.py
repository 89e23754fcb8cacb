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
    query = (
        select(EngineMinuteRow.seen).where(EngineMinuteRow.minute >= since).order_by(EngineMinuteRow.minute)
    )
    for minute in map(EngineMinute.model_validate, await session.scalars(query)):
        own = found[minute.host, minute.address]
        own[minute.minute] = own[minute.minute].joined(minute) if minute.minute in own else minute
    return found
