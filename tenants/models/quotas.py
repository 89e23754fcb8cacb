"""Limits, open reservations, crossed thresholds and live gateways."""

from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint, func
from sqlalchemy.dialects.postgresql import CHAR
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.models.usage import LEVELS
from loraplex.tenants.tables import Base, BigInt, Revision, one_of

LIMIT_COLUMNS = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "tokens_per_day",
    "tokens_per_month",
    "budget_per_day",
    "budget_per_month",
    "tokens_per_session",
    "max_adapters",
    "max_adapter_bytes",
    "max_keys",
    "default_max_tokens",
)
LATER = ("tokens_per_session", "default_max_tokens")
"""Limits whose constraints came with them."""


class Quota(Base):
    """The limits of a tenant, of one key, or of one adapter; null means unlimited. Budgets are in micro-units of money."""

    __tablename__ = "quotas"
    __table_args__ = (
        UniqueConstraint("tenant_id", "api_key_id", "adapter_id", postgresql_nulls_not_distinct=True),
        ForeignKeyConstraint(
            ["tenant_id", "api_key_id"], ["api_keys.tenant_id", "api_keys.id"], ondelete="CASCADE"
        ),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"], ondelete="CASCADE"
        ),
        CheckConstraint("num_nonnulls(api_key_id, adapter_id) <= 1", name="level"),
        CheckConstraint(
            " AND ".join(f"{name} >= 0" for name in LIMIT_COLUMNS if name not in LATER), name="limits"
        ),
        *(CheckConstraint(f"{name} >= 0", name=name) for name in LATER),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    api_key_id: Mapped[UUID | None]
    adapter_id: Mapped[UUID | None]
    requests_per_minute: Mapped[BigInt | None]
    tokens_per_minute: Mapped[BigInt | None]
    concurrent_requests: Mapped[BigInt | None]
    tokens_per_day: Mapped[BigInt | None]
    tokens_per_month: Mapped[BigInt | None]
    budget_per_day: Mapped[BigInt | None]
    budget_per_month: Mapped[BigInt | None]
    tokens_per_session: Mapped[BigInt | None]
    max_adapters: Mapped[BigInt | None]
    max_adapter_bytes: Mapped[BigInt | None]
    max_keys: Mapped[BigInt | None]
    default_max_tokens: Mapped[int | None]
    revision: Mapped[Revision]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AdmissionEpoch(Base):
    """The epoch of a tenant's counters in Valkey: a counter rebuild takes the next one under this row's lock.

    `fence`: the number of the tenant's newest fence, zero before the first. A gateway that has seen it answers no request
    that counters of `fenced_epoch` or an earlier epoch admitted. `ended_policy_epoch`: it has ended what callers of this or an
    earlier policy epoch ran; zero: nothing.
    """

    __tablename__ = "admission_epochs"
    __table_args__ = (Index("ix_admission_epochs_fence", "fence"),)

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    epoch: Mapped[BigInt]
    fenced_epoch: Mapped[BigInt] = mapped_column(server_default="0")
    fence: Mapped[BigInt] = mapped_column(server_default="0")
    ended_policy_epoch: Mapped[BigInt] = mapped_column(server_default="0")


class ReservationRow(Base):
    """An admitted request that is not settled: the most that it may use, and the end of its lease.

    `id` is the admission's UUIDv7. Amounts in nano-units of money. `day` and `month` are the periods of its admission.
    `sequences`: its prompts times `n`.
    """

    __tablename__ = "reservations"
    __table_args__ = (
        Index("ix_reservations_tenant_id_digest", "tenant_id", "digest"),
        Index("ix_reservations_expires_at", "expires_at"),
        CheckConstraint("prompt_tokens >= 0 AND completion_tokens >= 0 AND amount_nano >= 0", name="amounts"),
        CheckConstraint("sequences >= 1", name="sequences"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    api_key_id: Mapped[UUID]
    adapter_id: Mapped[UUID | None]
    digest: Mapped[str | None] = mapped_column(CHAR(64))
    gateway_id: Mapped[UUID]
    prompt_tokens: Mapped[BigInt]
    completion_tokens: Mapped[BigInt]
    amount_nano: Mapped[BigInt]
    day: Mapped[str]
    month: Mapped[str]
    admitted_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    sequences: Mapped[int] = mapped_column(server_default="1")


class QuotaEvent(Base):
    """A budget's use crossed a threshold (in percent); once per subject, limit, period and threshold."""

    __tablename__ = "quota_events"
    __table_args__ = (
        UniqueConstraint(
            *("tenant_id", "level", "subject_id", "limit_name", "period", "threshold"),
            name="uq_quota_events_once",
        ),
        Index("ix_quota_events_created_at", "created_at"),
        CheckConstraint(one_of("level", LEVELS), name="level"),
        CheckConstraint("threshold IN (80, 100)", name="threshold"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    level: Mapped[str]
    subject_id: Mapped[UUID]
    limit_name: Mapped[str]
    period: Mapped[str]
    threshold: Mapped[int]
    used: Mapped[BigInt]
    limit_value: Mapped[BigInt]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Gateway(Base):
    """A gateway process, alive while `seen_at` is recent. Without Valkey, live gateways share the rates.

    `fence`: its journal is shipped up to the moment at which it saw this fence. `skew_ms`: the newest difference
    between its clock and PostgreSQL's.
    """

    __tablename__ = "gateways"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    fence: Mapped[BigInt] = mapped_column(server_default="0")
    skew_ms: Mapped[BigInt] = mapped_column(server_default="0")
