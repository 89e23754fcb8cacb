"""Keeps the minutes of engines that a gateway has closed."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.engine_minutes.records import EngineMinute
from loraplex.tenants.models import EngineMinuteRow

KEY: Final = {"minute", "gateway", "number"}


async def keep(session: AsyncSession, minutes: Sequence[EngineMinute]) -> None:
    """Write minutes, as an operator. Of a minute that a clock has twice, the first stays."""
    rows = [each.model_dump(include=KEY) | {"seen": each.model_dump(mode="json")} for each in minutes]
    await session.execute(insert(EngineMinuteRow).on_conflict_do_nothing(), rows)
