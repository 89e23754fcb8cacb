"""What an admitted request met of its limits, next to its phases and as long as they are kept.

Revision 0021, after 0020.
"""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE request_phases ADD COLUMN limits jsonb")


def downgrade() -> None:
    op.execute("ALTER TABLE request_phases DROP COLUMN limits")
