"""Tenants, API keys, adapters with immutable versions, and aliases.

Revision 0001, after nothing.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NOW = sa.text("now()")
STATES = "'uploading', 'validating', 'ready', 'rejected', 'deprecated', 'deleting', 'quarantined'"
NAME = "^[a-z0-9][a-z0-9._-]{0,62}$"
KEEP_VERSIONS = """
CREATE FUNCTION keep_adapter_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'adapter versions are immutable' USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
KEEP_VERSIONS_TRIGGER = """
CREATE TRIGGER keep_adapter_version
BEFORE UPDATE OF id, tenant_id, adapter_id, version, digest, size_bytes, rank, config, created_at ON adapter_versions
FOR EACH ROW WHEN (
    (OLD.id, OLD.tenant_id, OLD.adapter_id, OLD.version, OLD.digest, OLD.size_bytes, OLD.rank, OLD.config, OLD.created_at)
    IS DISTINCT FROM
    (NEW.id, NEW.tenant_id, NEW.adapter_id, NEW.version, NEW.digest, NEW.size_bytes, NEW.rank, NEW.config, NEW.created_at)
) EXECUTE FUNCTION keep_adapter_version()
"""


def upgrade() -> None:
    create_tenants()
    create_api_keys()
    create_adapters()
    create_adapter_versions()
    create_adapter_aliases()
    op.execute(KEEP_VERSIONS)
    op.execute(KEEP_VERSIONS_TRIGGER)


def downgrade() -> None:
    for table in ("adapter_aliases", "adapter_versions", "adapters", "api_keys", "tenants"):
        op.drop_table(table)
    op.execute("DROP FUNCTION keep_adapter_version()")


def create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("weight", sa.Double(), server_default="1", nullable=False),
        sa.Column("suspended_at", sa.DateTime(timezone=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
        sa.CheckConstraint("name ~ '^[a-z0-9][a-z0-9-]{0,62}$'", name=op.f("ck_tenants_name")),
        sa.CheckConstraint("weight > 0 AND weight <= 1000", name=op.f("ck_tenants_weight")),
    )


def create_api_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid()),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.Column("replaced_by", sa.Uuid()),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("key_id", name="uq_api_keys_key_id"),
        tenant_reference("api_keys"),
        sa.ForeignKeyConstraint(
            ["replaced_by"], ["api_keys.id"], name="fk_api_keys_replaced_by_api_keys", ondelete="SET NULL"
        ),
        sa.CheckConstraint("environment IN ('live', 'test', 'op')", name=op.f("ck_api_keys_environment")),
        sa.CheckConstraint(
            "(tenant_id IS NULL) = (environment = 'op')", name=op.f("ck_api_keys_operator_has_no_tenant")
        ),
        sa.CheckConstraint("octet_length(secret_sha256) = 32", name=op.f("ck_api_keys_secret_sha256")),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])


def create_adapters() -> None:
    op.create_table(
        "adapters",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_adapters_tenant_id_id"),
        tenant_reference("adapters"),
        sa.CheckConstraint(f"name ~ '{NAME}'", name=op.f("ck_adapters_name")),
    )
    op.create_index(
        *("uq_adapters_live_name", "adapters", ["tenant_id", "name"]),
        unique=True,
        postgresql_where=sa.text("deleted_at IS NULL"),
    )


def create_adapter_versions() -> None:
    op.create_table(
        "adapter_versions",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("adapter_id", sa.Uuid(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("digest", sa.CHAR(64), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("config", postgresql.JSONB(), nullable=False),
        sa.Column("report", postgresql.JSONB(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_versions"),
        sa.UniqueConstraint("adapter_id", "version", name="uq_adapter_versions_adapter_id_version"),
        adapter_reference("adapter_versions"),
        sa.CheckConstraint("version >= 1", name=op.f("ck_adapter_versions_version")),
        sa.CheckConstraint("digest ~ '^[0-9a-f]{64}$'", name=op.f("ck_adapter_versions_digest")),
        sa.CheckConstraint("size_bytes >= 0", name=op.f("ck_adapter_versions_size_bytes")),
        sa.CheckConstraint("rank >= 1", name=op.f("ck_adapter_versions_rank")),
        sa.CheckConstraint(f"state IN ({STATES})", name=op.f("ck_adapter_versions_state")),
    )
    op.create_index("ix_adapter_versions_tenant_id_digest", "adapter_versions", ["tenant_id", "digest"])


def create_adapter_aliases() -> None:
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", sa.Uuid(), nullable=False),
        sa.Column("alias", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("previous_version", sa.Integer()),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_adapter_aliases"),
        adapter_reference("adapter_aliases"),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.version"],
            name="fk_adapter_aliases_adapter_id_version_adapter_versions",
        ),
        sa.CheckConstraint(f"alias ~ '{NAME}'", name=op.f("ck_adapter_aliases_alias")),
    )
    op.create_index("ix_adapter_aliases_tenant_id", "adapter_aliases", ["tenant_id"])


def tenant_reference(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id"], ["tenants.id"], name=f"fk_{table}_tenant_id_tenants", ondelete="CASCADE"
    )


def adapter_reference(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id", "adapter_id"],
        ["adapters.tenant_id", "adapters.id"],
        name=f"fk_{table}_tenant_id_adapter_id_adapters",
        ondelete="CASCADE",
    )
