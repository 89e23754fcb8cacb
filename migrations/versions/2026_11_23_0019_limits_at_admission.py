"""What an admitted request met of its limits, next to its phases and as long as they are kept.

Revision 0019, after 0018.
"""

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE request_phases ADD COLUMN limits jsonb")


def downgrade() -> None:
    op.execute("ALTER TABLE request_phases DROP COLUMN limits")
