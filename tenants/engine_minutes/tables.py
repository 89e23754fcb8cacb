"""The table of minutes. Invariant: it names no tenant, and only operators read it."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.tables import Base


class EngineMinuteRow(Base):
    """One minute of one engine as one gateway saw it. `number`: the engine's in that gateway; `seen`: an `EngineMinute`."""

    __tablename__ = "engine_minutes"

    minute: Mapped[datetime] = mapped_column(primary_key=True)
    gateway: Mapped[UUID] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    seen: Mapped[dict[str, Any]]
