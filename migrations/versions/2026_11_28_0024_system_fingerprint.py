"""A row of the ledger names the fingerprint of the engine that ran its request; null where that is unknown.

Revision 0024, after 0023.
"""

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE usage_records ADD COLUMN system_fingerprint text")


def downgrade() -> None:
    op.execute("ALTER TABLE usage_records DROP COLUMN system_fingerprint")
