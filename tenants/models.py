"""The tables of tenants, keys and adapters (SQLAlchemy 2). Invariant: every row of a tenant carries `tenant_id`, and
foreign keys include it, so that a row can never point into another tenant.
"""

from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID, uuid4

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, CHAR, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from loraplex.tenants.names import ADAPTER_NAME, ALIAS_NAME, TENANT_NAME

ENVIRONMENTS = ("live", "test", "op")
VERSION_STATES = ("uploading", "validating", "ready", "rejected", "deprecated", "deleting", "quarantined")
TOOL_STYLES = ("hermes", "llama3", "mistral", "generic")
NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


def one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


class Base(DeclarativeBase):
    """All tables share one naming convention, so that migrations can name every constraint."""

    metadata = MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: DateTime(timezone=True),
        str: Text(),
        dict[str, Any]: JSONB(),
        list[str]: ARRAY(Text()),
        bytes: LargeBinary(),
    }


class Tenant(Base):
    """A customer; `weight` is its share of the engine relative to others."""

    __tablename__ = "tenants"
    __table_args__ = (
        UniqueConstraint("name"),
        CheckConstraint(f"name ~ '{TENANT_NAME}'", name="name"),
        CheckConstraint("weight > 0 AND weight <= 1000", name="weight"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    name: Mapped[str]
    weight: Mapped[float] = mapped_column(server_default="1")
    suspended_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiKey(Base):
    """A key: its public id and the SHA-256 of its secret. An operator's key has no tenant."""

    __tablename__ = "api_keys"
    __table_args__ = (
        UniqueConstraint("key_id"),
        CheckConstraint(one_of("environment", ENVIRONMENTS), name="environment"),
        CheckConstraint("(tenant_id IS NULL) = (environment = 'op')", name="operator_has_no_tenant"),
        CheckConstraint("octet_length(secret_sha256) = 32", name="secret_sha256"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    key_id: Mapped[str]
    environment: Mapped[str]
    name: Mapped[str]
    secret_sha256: Mapped[bytes]
    scopes: Mapped[list[str]]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    replaced_by: Mapped[UUID | None] = mapped_column(ForeignKey("api_keys.id", ondelete="SET NULL"))

    tenant: Mapped[Tenant | None] = relationship(lazy="raise")


class Adapter(Base):
    """A name for a line of versions; a deleted one frees its name."""

    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        Index(
            "uq_adapters_live_name",
            "tenant_id",
            "name",
            unique=True,
            postgresql_where=text("deleted_at IS NULL"),
        ),
        CheckConstraint(f"name ~ '{ADAPTER_NAME}'", name="name"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deleted_at: Mapped[datetime | None]


class AdapterVersion(Base):
    """One immutable upload: only `state` and `report` may change after it is made (a trigger holds it).

    `tool_style` and `defaults` may change until `aliased_at`, the time of its first alias, which another trigger sets.
    """

    __tablename__ = "adapter_versions"
    __table_args__ = (
        UniqueConstraint("adapter_id", "version"),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"], ondelete="CASCADE"
        ),
        Index("ix_adapter_versions_tenant_id_digest", "tenant_id", "digest"),
        CheckConstraint("version >= 1", name="version"),
        CheckConstraint("digest ~ '^[0-9a-f]{64}$'", name="digest"),
        CheckConstraint("size_bytes >= 0", name="size_bytes"),
        CheckConstraint("rank >= 1", name="rank"),
        CheckConstraint(one_of("state", VERSION_STATES), name="state"),
        CheckConstraint(one_of("tool_style", TOOL_STYLES), name="tool_style"),
        CheckConstraint("jsonb_typeof(defaults) = 'object'", name="defaults"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[UUID]
    adapter_id: Mapped[UUID]
    version: Mapped[int]
    digest: Mapped[str] = mapped_column(CHAR(64))
    state: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    rank: Mapped[int]
    config: Mapped[dict[str, Any]]
    report: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    tool_style: Mapped[str | None]
    defaults: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default=text("'{}'::jsonb"))
    aliased_at: Mapped[datetime | None]


class AdapterAlias(Base):
    """A movable name for one version; `previous_version` is where a rollback goes."""

    __tablename__ = "adapter_aliases"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"], ondelete="CASCADE"
        ),
        ForeignKeyConstraint(
            ["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.version"]
        ),
        CheckConstraint(f"alias ~ '{ALIAS_NAME}'", name="alias"),
    )

    adapter_id: Mapped[UUID] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(index=True)
    version: Mapped[int]
    previous_version: Mapped[int | None]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())
