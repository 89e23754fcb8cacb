"""Keeps the minutes of engines that a gateway has closed."""

from collections.abc import Sequence

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.engine_minutes.records import EngineMinute
from loraplex.tenants.models import EngineMinuteRow


async def keep(session: AsyncSession, minutes: Sequence[EngineMinute]) -> None:
    """Write minutes, as an operator."""
    await session.execute(insert(EngineMinuteRow), [each.model_dump() for each in minutes])
