"""What admits requests sees which adapters are deleted: limits of those that are gone are read no more.

Revision 0010, after 0009.
"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("GRANT SELECT (id, tenant_id, deleted_at) ON adapters TO app_writer")


def downgrade() -> None:
    op.execute("REVOKE SELECT (id, tenant_id, deleted_at) ON adapters FROM app_writer")
