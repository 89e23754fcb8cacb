"""Guards of aliases. Invariant: a guard holds for one generation of its alias; one of an earlier generation means nothing."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKeyConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.tables import Base


class AliasGuard(Base):
    """The guard of an alias, with its two versions and the canary's weight in percent.

    `counts`: what `GuardCounts` has, of the requests that were admitted since `began_at` and settled until `counted_until`.
    """

    __tablename__ = "alias_guards"
    __table_args__ = (
        ForeignKeyConstraint(
            ["adapter_id", "alias"],
            ["adapter_aliases.adapter_id", "adapter_aliases.alias"],
            ondelete="CASCADE",
        ),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"], ondelete="CASCADE"
        ),
        CheckConstraint("baseline <> canary", name="versions"),
        CheckConstraint(
            "num_nonnulls(max_failure_ratio, max_unsatisfied, max_ttft_ratio) >= 1", name="bounds"
        ),
    )

    adapter_id: Mapped[UUID] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(index=True)
    generation: Mapped[int]
    baseline: Mapped[int]
    canary: Mapped[int]
    canary_weight: Mapped[int]
    max_failure_ratio: Mapped[float | None]
    max_unsatisfied: Mapped[float | None]
    max_ttft_ratio: Mapped[float | None]
    min_requests: Mapped[int]
    began_at: Mapped[datetime] = mapped_column(server_default=func.now())
    counted_until: Mapped[datetime] = mapped_column(server_default=func.now())
    counts: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
