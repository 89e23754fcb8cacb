"""The newest difference between a gateway's clock and PostgreSQL's, for which the end of a month waits.

Revision 0029, after 0028.
"""

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE gateways ADD COLUMN skew_ms bigint NOT NULL DEFAULT 0")


def downgrade() -> None:
    op.execute("ALTER TABLE gateways DROP COLUMN skew_ms")
