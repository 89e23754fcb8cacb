"""The audit log, and stored responses to repeated requests. Invariant: the audit log only grows."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index, func
from sqlalchemy.dialects.postgresql import INET
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.tables import Base, one_of

ACTOR_KINDS = ("key", "operator", "command", "system", "user")


class AuditEntry(Base):
    """One change. `id` is a UUIDv7, so that entries sort by time; `tenant_id` is null for what concerns no tenant.

    `before` and `after` contain the changed fields and no secret. A trigger refuses every update and every deletion except
    by retention.
    """

    __tablename__ = "audit_entries"
    __table_args__ = (
        Index("ix_audit_entries_tenant_id_id", "tenant_id", "id"),
        CheckConstraint(one_of("actor_kind", ACTOR_KINDS), name="actor_kind"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id"))
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    actor_kind: Mapped[str]
    actor: Mapped[str]
    action: Mapped[str]
    target: Mapped[str]
    before: Mapped[dict[str, Any] | None]
    after: Mapped[dict[str, Any] | None]
    address: Mapped[str | None] = mapped_column(INET)
    request_id: Mapped[str | None]


class IdempotencyRecord(Base):
    """The response to a POST with an Idempotency-Key, encrypted with a key derived from the server secret, since it may
    contain a new API key. `status` null: the first request is still running.
    """

    __tablename__ = "idempotency_records"
    __table_args__ = (
        Index("ix_idempotency_records_expires_at", "expires_at"),
        CheckConstraint("octet_length(body_sha256) = 32", name="body_sha256"),
        CheckConstraint("(status IS NULL) = (sealed_answer IS NULL)", name="answer"),
    )

    caller: Mapped[str] = mapped_column(primary_key=True)
    idempotency_key: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    route: Mapped[str]
    body_sha256: Mapped[bytes]
    status: Mapped[int | None]
    sealed_answer: Mapped[bytes | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
