"""The tables of recorded requests. Invariant: without a policy that says so, a tenant has no recorded request."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ForeignKey, Index
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.tables import Base, Revision


class DataPolicy(Base):
    """What is kept of a tenant's requests. `record_requests`: a `RecordRequests`, null for nothing; no row means the same."""

    __tablename__ = "data_policies"

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    record_requests: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    revision: Mapped[Revision]


class RecordedRequest(Base):
    """A chat completion with its answer, encrypted for this row. `adapter` null: of the base model `base_digest`."""

    __tablename__ = "recorded_requests"
    __table_args__ = (
        Index("ix_recorded_requests_tenant_id", "tenant_id", "id"),
        Index("ix_recorded_requests_expires_at", "expires_at"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("data_policies.tenant_id", ondelete="CASCADE"))
    adapter: Mapped[str | None]
    base_digest: Mapped[str]
    content: Mapped[bytes]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
