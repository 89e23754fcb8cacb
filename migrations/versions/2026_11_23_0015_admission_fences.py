"""Fences: before a tenant's counters are rebuilt, or its files removed, every gateway ships what its journal has.

Fences of all tenants are numbered by one sequence and become visible in its order. Revision 0015, after 0014.
"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

STATEMENTS = (
    "CREATE SEQUENCE admission_fence",
    "GRANT USAGE ON SEQUENCE admission_fence TO app_writer",
    """
    ALTER TABLE admission_epochs
        ADD COLUMN fenced_epoch bigint NOT NULL DEFAULT 0,
        ADD COLUMN fence bigint NOT NULL DEFAULT 0
    """,
    "CREATE INDEX ix_admission_epochs_fence ON admission_epochs (fence)",
    "ALTER TABLE gateways ADD COLUMN fence bigint NOT NULL DEFAULT 0",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    op.execute("ALTER TABLE gateways DROP COLUMN fence")
    op.execute("DROP INDEX ix_admission_epochs_fence")
    op.execute("ALTER TABLE admission_epochs DROP COLUMN fence, DROP COLUMN fenced_epoch")
    op.execute("DROP SEQUENCE admission_fence")
