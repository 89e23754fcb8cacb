"""An open request says how many sequences it runs, and retention finds ended keys without reading all.

Revision 0011, after 0010.
"""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

SEQUENCES = """
ALTER TABLE reservations
    ADD COLUMN sequences integer NOT NULL DEFAULT 1,
    ADD CONSTRAINT ck_reservations_sequences CHECK (sequences >= 1)
"""
ENDED_KEYS = "CREATE INDEX ix_api_keys_ended_at ON api_keys (LEAST(revoked_at, expires_at))"


def upgrade() -> None:
    for statement in (SEQUENCES, ENDED_KEYS):
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP INDEX ix_api_keys_ended_at")
    op.execute("ALTER TABLE reservations DROP COLUMN sequences")
