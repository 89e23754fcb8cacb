"""Adapters: names, immutable versions, movable aliases and uploads in parts. Invariant: foreign keys include `tenant_id`,
so that a row can never point into another tenant.
"""

from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint, func, text
from sqlalchemy.dialects.postgresql import CHAR, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.names import ADAPTER_NAME, ALIAS_NAME
from loraplex.tenants.tables import Base, BigInt, Revision, one_of

VERSION_STATES = ("uploading", "validating", "ready", "rejected", "deprecated", "deleting", "quarantined")
TOOL_STYLES = ("hermes", "llama3", "mistral", "generic")
REASONING_STYLES = ("none", "think")
DECISION_READS = ("labels", "values")
UPLOAD_STATES = ("open", "completed", "aborted", "expired")
UPLOAD_FILES = ("adapter_config.json", "adapter_model.safetensors")
UNJUDGED_STATES = ("uploading", "validating", "rejected", "deleting")


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
    description: Mapped[str] = mapped_column(default="", server_default="")
    revision: Mapped[Revision]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deleted_at: Mapped[datetime | None]


class AdapterVersion(Base):
    """One immutable version. A trigger refuses changes but of `state` and `report`; `digest`, `rank` and `config` may be set
    once, from null, by validation.

    `tool_style`, `reasoning_style`, `defaults` and `decision` may change until `aliased_at`, the time of its first alias, which another trigger
    sets. A deleted version stays in the state `deleting`; `blob_deleted_at`: its files are removed. `ended_fence`: the fence by
    which the requests that ran on it ended.
    """

    __tablename__ = "adapter_versions"
    __table_args__ = (
        UniqueConstraint("adapter_id", "version"),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"], ondelete="CASCADE"
        ),
        Index("ix_adapter_versions_tenant_id_digest", "tenant_id", "digest"),
        Index(
            *("ix_adapter_versions_ended_fence", "tenant_id", "ended_fence"),
            postgresql_where=text("ended_fence IS NOT NULL"),
        ),
        CheckConstraint("version >= 1", name="version"),
        CheckConstraint("digest ~ '^[0-9a-f]{64}$'", name="digest"),
        CheckConstraint("size_bytes >= 0", name="size_bytes"),
        CheckConstraint("rank >= 1", name="rank"),
        CheckConstraint(one_of("state", VERSION_STATES), name="state"),
        CheckConstraint(
            f"num_nulls(digest, rank, config) = 0 OR {one_of('state', UNJUDGED_STATES)}", name="validated"
        ),
        CheckConstraint(one_of("tool_style", TOOL_STYLES), name="tool_style"),
        CheckConstraint(
            """reasoning_style IN ('"none"', '"think"') OR jsonb_typeof(reasoning_style) = 'object'""",
            name="reasoning_style",
        ),
        CheckConstraint("jsonb_typeof(defaults) = 'object'", name="defaults"),
        CheckConstraint(one_of("decision->>'read'", DECISION_READS), name="decision"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[UUID]
    adapter_id: Mapped[UUID]
    version: Mapped[int]
    digest: Mapped[str | None] = mapped_column(CHAR(64))
    state: Mapped[str]
    size_bytes: Mapped[BigInt]
    rank: Mapped[int | None]
    config: Mapped[dict[str, Any] | None]
    report: Mapped[dict[str, Any]]
    revision: Mapped[Revision]
    created_by: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    tool_style: Mapped[str | None]
    reasoning_style: Mapped[str | dict[str, str] | None] = mapped_column(JSONB(none_as_null=True))
    defaults: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default=text("'{}'::jsonb"))
    decision: Mapped[dict[str, str] | None] = mapped_column(JSONB(none_as_null=True))
    aliased_at: Mapped[datetime | None]
    blob_deleted_at: Mapped[datetime | None]
    ended_fence: Mapped[BigInt | None]


class DecisionCalibration(Base):
    """The temperatures of one adapter's decisions under one base model, one wording and one way to read options. `sha256`: of what they hold for, and of them."""

    __tablename__ = "decision_calibrations"

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    digest: Mapped[str] = mapped_column(CHAR(64), primary_key=True)
    system_fingerprint: Mapped[str] = mapped_column(primary_key=True)
    format: Mapped[str] = mapped_column(primary_key=True)
    read: Mapped[str] = mapped_column(primary_key=True)
    temperatures: Mapped[dict[str, Any]]
    report: Mapped[dict[str, Any]]
    sha256: Mapped[str] = mapped_column(CHAR(64))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AdapterAlias(Base):
    """A movable name: `generation` selects its current targets, `previous_generation` those of a rollback."""

    __tablename__ = "adapter_aliases"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"], ondelete="CASCADE"
        ),
        CheckConstraint(f"alias ~ '{ALIAS_NAME}'", name="alias"),
        CheckConstraint("generation >= 1 AND previous_generation < generation", name="generation"),
    )

    adapter_id: Mapped[UUID] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(index=True)
    generation: Mapped[int] = mapped_column(server_default="1")
    previous_generation: Mapped[int | None]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AliasTarget(Base):
    """A share of an alias's requests in one generation: immutable; the weights of a generation sum to 100."""

    __tablename__ = "alias_targets"
    __table_args__ = (
        ForeignKeyConstraint(
            ["adapter_id", "alias"],
            ["adapter_aliases.adapter_id", "adapter_aliases.alias"],
            ondelete="CASCADE",
        ),
        ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.version"],
            ondelete="CASCADE",
        ),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"], ondelete="CASCADE"
        ),
        CheckConstraint("weight BETWEEN 1 AND 100", name="weight"),
    )

    adapter_id: Mapped[UUID] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[UUID] = mapped_column(index=True)
    weight: Mapped[int]


class Upload(Base):
    """An upload in parts; `files` is `[{name, size, sha256}]`. Its bytes count against the tenant until it ends.

    Until `claimed_until` one gateway assembles its parts, and no other may change it.
    """

    __tablename__ = "uploads"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"], ondelete="CASCADE"
        ),
        Index("ix_uploads_open", "expires_at", postgresql_where=text("state = 'open'")),
        CheckConstraint(one_of("state", UPLOAD_STATES), name="state"),
        CheckConstraint("size_bytes >= 0", name="size_bytes"),
        CheckConstraint("part_size >= 1", name="part_size"),
        CheckConstraint("(state = 'completed') = (version IS NOT NULL)", name="version"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[UUID]
    adapter_id: Mapped[UUID]
    files: Mapped[list[dict[str, Any]]]
    size_bytes: Mapped[BigInt]
    part_size: Mapped[int]
    state: Mapped[str]
    version: Mapped[int | None]
    created_by: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    claimed_until: Mapped[datetime | None]


class UploadPart(Base):
    """A part whose bytes are stored as the object `object_id`; `number` counts from 1."""

    __tablename__ = "upload_parts"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "upload_id"], ["uploads.tenant_id", "uploads.id"], ondelete="CASCADE"
        ),
        CheckConstraint(one_of("file", UPLOAD_FILES), name="file"),
        CheckConstraint("number >= 1", name="number"),
        CheckConstraint("size_bytes >= 0", name="size_bytes"),
        CheckConstraint("sha256 ~ '^[0-9a-f]{64}$'", name="sha256"),
    )

    upload_id: Mapped[UUID] = mapped_column(primary_key=True)
    file: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[UUID] = mapped_column(index=True)
    size_bytes: Mapped[BigInt]
    sha256: Mapped[str] = mapped_column(CHAR(64))
    received_at: Mapped[datetime] = mapped_column(server_default=func.now())
    object_id: Mapped[UUID]
