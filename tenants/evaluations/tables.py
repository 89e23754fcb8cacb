"""The tables of evaluations. Invariant: a suite and a finished evaluation never change; their contents are encrypted."""

from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint, func, text
from sqlalchemy.dialects.postgresql import CHAR
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.evaluations.records import OPEN_STATES, STATES
from loraplex.tenants.names import ADAPTER_NAME
from loraplex.tenants.tables import Base, BigInt, one_of


class Suite(Base):
    """A JSONL file of cases. `tenant_id` null: the installation's, which every tenant may use. `sha256`: of the file.

    `base_digest`: the base model that the cases are for; null for any.
    """

    __tablename__ = "suites"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name", postgresql_nulls_not_distinct=True),
        CheckConstraint(f"name ~ '{ADAPTER_NAME}'", name="name"),
        CheckConstraint("cases BETWEEN 1 AND 10000", name="cases"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str]
    sha256: Mapped[str] = mapped_column(CHAR(64))
    cases: Mapped[int]
    size_bytes: Mapped[BigInt]
    base_digest: Mapped[str | None]
    content: Mapped[bytes] = mapped_column(deferred=True)
    created_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    @property
    def shared(self) -> bool:
        """Whether it is the installation's."""
        return self.tenant_id is None


class Evaluation(Base):
    """A version on a suite. A gateway that runs it holds `claim` until `claimed_until`; then another one goes on.

    `suite_id` null: the built-in suite, or one that is deleted since. `baseline`: a model's name as requests have it, pinned. `profile`: the version's when it began. `key_id`: the key whose requests these are, from `address`.
    """

    __tablename__ = "evaluations"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"], ondelete="CASCADE"
        ),
        Index("ix_evaluations_version", "adapter_id", "version", "suite_sha256"),
        Index("ix_evaluations_tenant_id", "tenant_id"),
        Index("ix_evaluations_open", "created_at", postgresql_where=text(one_of("state", OPEN_STATES))),
        CheckConstraint(one_of("state", STATES), name="state"),
        CheckConstraint("(state = 'completed') = (report IS NOT NULL)", name="report"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    adapter_id: Mapped[UUID]
    version: Mapped[int]
    suite: Mapped[str]
    suite_id: Mapped[UUID | None] = mapped_column(ForeignKey("suites.id", ondelete="SET NULL"))
    suite_sha256: Mapped[str] = mapped_column(CHAR(64))
    baseline: Mapped[str | None]
    profile: Mapped[dict[str, Any]]
    seed: Mapped[BigInt]
    state: Mapped[str] = mapped_column(server_default="queued")
    reason: Mapped[str | None]
    total: Mapped[int]
    done: Mapped[int] = mapped_column(server_default="0")
    pass_rate: Mapped[float | None]
    baseline_pass_rate: Mapped[float | None]
    system_fingerprint: Mapped[str | None]
    latency: Mapped[dict[str, Any] | None]
    report: Mapped[bytes | None] = mapped_column(deferred=True)
    report_sha256: Mapped[str | None] = mapped_column(CHAR(64))
    key_id: Mapped[str]
    address: Mapped[str | None]
    created_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
    claim: Mapped[UUID | None]
    claimed_until: Mapped[datetime | None]


class EvaluationAnswer(Base):
    """The answer to one case of a running evaluation; the report replaces it. `side` 0: the version's, 1: the baseline's."""

    __tablename__ = "evaluation_answers"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "evaluation_id"], ["evaluations.tenant_id", "evaluations.id"], ondelete="CASCADE"
        ),
    )

    evaluation_id: Mapped[UUID] = mapped_column(primary_key=True)
    side: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    place: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[UUID]
    result: Mapped[bytes]


class AliasGate(Base):
    """What a version needs before the alias may point to it: an evaluation on the suite that keeps both bounds."""

    __tablename__ = "alias_gates"
    __table_args__ = (
        ForeignKeyConstraint(
            ["adapter_id", "alias"],
            ["adapter_aliases.adapter_id", "adapter_aliases.alias"],
            ondelete="CASCADE",
        ),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"], ondelete="CASCADE"
        ),
        CheckConstraint("min_pass BETWEEN 0 AND 1 AND max_regression BETWEEN 0 AND 1", name="bounds"),
    )

    adapter_id: Mapped[UUID] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(index=True)
    suite: Mapped[str]
    suite_id: Mapped[UUID | None] = mapped_column(ForeignKey("suites.id"))
    suite_sha256: Mapped[str] = mapped_column(CHAR(64))
    min_pass: Mapped[float]
    max_regression: Mapped[float | None]
    changed_by: Mapped[str]
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())
