"""The table of minutes. Invariant: it names no tenant, and only operators read it."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import BigInteger
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.tables import Base, BigInt


class EngineMinuteRow(Base):
    """One minute of one engine as one gateway saw it: the columns of `EngineMinute`."""

    __tablename__ = "engine_minutes"

    minute: Mapped[datetime] = mapped_column(primary_key=True)
    gateway: Mapped[UUID] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    host: Mapped[str]
    address: Mapped[str]
    prompt_tokens: Mapped[BigInt]
    generation_tokens: Mapped[BigInt]
    running: Mapped[int]
    waiting: Mapped[int]
    referenced_blocks: Mapped[BigInt]
    total_blocks: Mapped[BigInt]
    device_adapters: Mapped[int]
    host_adapters: Mapped[int]
    ttft_buckets: Mapped[list[int]] = mapped_column(ARRAY(BigInteger()))
    gap_buckets: Mapped[list[int]] = mapped_column(ARRAY(BigInteger()))
