"""A deleted tenant says when all of it was erased, and retention finds old events without reading all.

Revision 0008, after 0007.
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TENANTS = """
ALTER TABLE tenants
    ADD COLUMN erased_at timestamptz,
    ADD CONSTRAINT ck_tenants_erased_at CHECK (erased_at IS NULL OR deleted_at IS NOT NULL)
"""
INDEXES = (
    "CREATE INDEX ix_tenants_deleted_at ON tenants (deleted_at) WHERE deleted_at IS NOT NULL",
    "CREATE INDEX ix_quota_events_created_at ON quota_events (created_at)",
)


def upgrade() -> None:
    for statement in (TENANTS, *INDEXES):
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP INDEX ix_quota_events_created_at")
    op.execute("ALTER TABLE tenants DROP COLUMN erased_at")
    op.execute("DROP INDEX ix_tenants_deleted_at")
