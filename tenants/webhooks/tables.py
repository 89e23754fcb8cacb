"""The tables of webhooks: endpoints, events and deliveries. Invariant: an event is written in the transaction of what it reports,
and reaches an endpoint by exactly one delivery.
"""

from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    UniqueConstraint,
    func,
    select,
    text,
)
from sqlalchemy.orm import Mapped, column_property, mapped_column

from loraplex.tenants.tables import Base, Revision, one_of
from loraplex.tenants.webhooks.records import DELIVERY_STATES, EVENT_TYPES


class WebhookEndpoint(Base):
    """A tenant's address for events. Secrets are encrypted with a key derived from the server secret.

    `previous_secret` signs too until `previous_secret_until`, so that a receiver can change its own copy in between.
    """

    __tablename__ = "webhook_endpoints"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        CheckConstraint(
            f"cardinality(events) >= 1 AND events <@ ARRAY[{', '.join(map(repr, EVENT_TYPES))}]",
            name="events",
        ),
        CheckConstraint("(previous_secret IS NULL) = (previous_until IS NULL)", name="previous"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    url: Mapped[str]
    events: Mapped[list[str]]
    encrypted_secret: Mapped[bytes] = mapped_column("sealed_secret")
    previous_secret: Mapped[bytes | None]
    previous_secret_until: Mapped[datetime | None] = mapped_column("previous_until")
    revision: Mapped[Revision]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class OutboxEvent(Base):
    """One event. `id` follows from tenant, type and `subject`, so a repeated transaction adds no second one.

    `dispatched_at`: its deliveries exist since then.
    """

    __tablename__ = "outbox_events"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        Index("ix_outbox_events_undispatched", "created_at", postgresql_where=text("dispatched_at IS NULL")),
        Index("ix_outbox_events_created_at", "created_at"),
        CheckConstraint(one_of("type", EVENT_TYPES), name="type"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    type: Mapped[str]
    subject: Mapped[str]
    data: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    dispatched_at: Mapped[datetime | None]


class WebhookDelivery(Base):
    """The delivery of one event to one endpoint. A gateway that attempts it counts the attempt and moves `due_at` to the end
    of its lease; its result counts only while `attempts` is unchanged.

    `dead`: given up, because no attempt is left or `expires_at` has passed. `attempts` counts on when it is replayed.
    """

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        UniqueConstraint("event_id", "endpoint_id"),
        ForeignKeyConstraint(
            ["tenant_id", "event_id"], ["outbox_events.tenant_id", "outbox_events.id"], ondelete="CASCADE"
        ),
        ForeignKeyConstraint(
            ["tenant_id", "endpoint_id"],
            ["webhook_endpoints.tenant_id", "webhook_endpoints.id"],
            ondelete="CASCADE",
        ),
        Index(
            "ix_webhook_deliveries_pending",
            "tenant_id",
            "due_at",
            postgresql_where=text("state = 'pending'"),
        ),
        Index("ix_webhook_deliveries_endpoint_id_created_at", "endpoint_id", "created_at", "id"),
        CheckConstraint(one_of("state", DELIVERY_STATES), name="state"),
        CheckConstraint("attempts >= 0 AND attempts_left >= 0", name="attempts"),
        CheckConstraint("(state = 'pending') = (ended_at IS NULL)", name="ended"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, server_default=func.gen_random_uuid())
    tenant_id: Mapped[UUID]
    event_id: Mapped[UUID] = mapped_column()
    endpoint_id: Mapped[UUID]
    state: Mapped[str] = mapped_column(server_default="pending")
    attempts: Mapped[int] = mapped_column(server_default="0")
    attempts_left: Mapped[int]
    due_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    last_attempt_at: Mapped[datetime | None]
    last_status: Mapped[int | None]
    last_error: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
    type: Mapped[str] = column_property(
        select(OutboxEvent.type)
        .where(OutboxEvent.id == event_id)
        .correlate_except(OutboxEvent)
        .scalar_subquery(),
        # It never changes.
        expire_on_flush=False,
    )

    @property
    def next_attempt_at(self) -> datetime | None:
        """When it is attempted next; None when it has ended."""
        return self.due_at if self.state == "pending" else None
