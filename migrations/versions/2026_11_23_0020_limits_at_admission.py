"""What an admitted request met of its limits, next to its phases and as long as they are kept.

Revision 0020, after 0019.
"""

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE request_phases ADD COLUMN limits jsonb")


def downgrade() -> None:
    op.execute("ALTER TABLE request_phases DROP COLUMN limits")
