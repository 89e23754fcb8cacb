"""Tenants and API keys. Invariant: a key belongs to one tenant or to the operator; only a digest of its secret is stored."""

from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import CheckConstraint, FetchedValue, ForeignKey, Index, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column, query_expression, relationship

from loraplex.tenants.names import TENANT_NAME
from loraplex.tenants.tables import Base, BigInt, Revision, one_of

ENVIRONMENTS = ("live", "test", "op")
KEY_KINDS = ("key", "console")
UNKNOWN_PARAMETERS = ("default", "refuse", "report")
"""A tenant's choice for requests with parameters that are not known; `default` is the installation's."""


class Tenant(Base):
    """A customer; `weight` is its share of the engine relative to others.

    Triggers raise `policy_epoch` with every change that affects what a request may do: keys, limits, weight, suspension; and
    with what a model name refers to.
    A deleted tenant keeps its row, because the ledger's numbers stay; its name is free. `erased_at`: all else is erased.
    """

    __tablename__ = "tenants"
    __table_args__ = (
        Index("uq_tenants_live_name", "name", unique=True, postgresql_where=text("deleted_at IS NULL")),
        Index("ix_tenants_deleted_at", "deleted_at", postgresql_where=text("deleted_at IS NOT NULL")),
        CheckConstraint(f"name ~ '{TENANT_NAME}'", name="name"),
        CheckConstraint("erased_at IS NULL OR deleted_at IS NOT NULL", name="erased_at"),
        CheckConstraint(f"tier ~ '{TENANT_NAME}'", name="tier"),
        CheckConstraint("weight > 0 AND weight <= 1000", name="weight"),
        CheckConstraint(one_of("unknown_parameters", UNKNOWN_PARAMETERS), name="unknown_parameters"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    name: Mapped[str]
    weight: Mapped[float] = mapped_column(server_default="1")
    tier: Mapped[str] = mapped_column(server_default="standard")
    unknown_parameters: Mapped[str] = mapped_column(server_default="default")
    policy_epoch: Mapped[BigInt] = mapped_column(server_default="1", server_onupdate=FetchedValue())
    revision: Mapped[Revision]
    suspended_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    erased_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiKey(Base):
    """A key: its public id and the SHA-256 of its secret, which no role but the owner of `find_api_key` may read.

    `ended_fence`: the fence by which its running requests ended with it.

    `kind` `console`: a credential that the console made for one of its sessions. It is no key that a tenant manages or counts.
    `parent_id`: the key that minted or preceded this one; null for those of people and operators. `limit_root`, which triggers keep: the
    topmost of its ancestors and itself with limits on requests. It binds, as a group, all keys below it, also once it is revoked.
    """

    __tablename__ = "api_keys"
    __table_args__ = (
        UniqueConstraint("key_id"),
        Index("ix_api_keys_ended_at", text("LEAST(revoked_at, expires_at)")),
        *(
            Index(f"ix_api_keys_{column}", column, postgresql_where=text(f"{column} IS NOT NULL"))
            for column in ("replaced_by", "parent_id", "limit_root")
        ),
        Index(
            *("ix_api_keys_ended_fence", "tenant_id", "ended_fence"),
            postgresql_where=text("ended_fence IS NOT NULL"),
        ),
        UniqueConstraint("tenant_id", "id"),
        CheckConstraint(one_of("environment", ENVIRONMENTS), name="environment"),
        CheckConstraint(one_of("kind", KEY_KINDS), name="kind"),
        CheckConstraint("(tenant_id IS NULL) = (environment = 'op')", name="operator_has_no_tenant"),
        CheckConstraint("octet_length(secret_sha256) = 32", name="secret_sha256"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    key_id: Mapped[str]
    environment: Mapped[str]
    kind: Mapped[str] = mapped_column(server_default=text("'key'"))
    name: Mapped[str]
    secret_sha256: Mapped[bytes] = mapped_column(deferred=True, deferred_raiseload=True)
    scopes: Mapped[list[str]]
    allowed_cidrs: Mapped[list[str]] = mapped_column(default=list, server_default=text("'{}'::text[]"))
    created_by: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revision: Mapped[Revision]
    replaced_by: Mapped[UUID | None] = mapped_column(ForeignKey("api_keys.id", ondelete="SET NULL"))
    ended_fence: Mapped[BigInt | None]
    parent_id: Mapped[UUID | None] = mapped_column(ForeignKey("api_keys.id", ondelete="SET NULL"))
    limit_root: Mapped[UUID | None] = mapped_column(
        ForeignKey("api_keys.id", ondelete="SET NULL"), server_default=FetchedValue()
    )

    tenant: Mapped[Tenant | None] = relationship(lazy="raise")
    successor: Mapped["ApiKey | None"] = relationship(remote_side=id, foreign_keys=replaced_by, lazy="raise")
    # The public ids of these two keys, for those who read whole keys: loaded as objects, they would overwrite one another.
    parent_key_id: Mapped[str | None] = query_expression()
    root_key_id: Mapped[str | None] = query_expression()
