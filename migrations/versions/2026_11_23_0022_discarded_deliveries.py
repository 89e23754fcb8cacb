"""A tenant discards its own deliveries that have ended: those that were given up need not stay until their retention ends.

Revision 0022, after 0021.
"""

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("GRANT DELETE ON webhook_deliveries TO app_tenant")
    op.execute(
        "CREATE POLICY ended_rows ON webhook_deliveries AS RESTRICTIVE FOR DELETE TO app_tenant USING (state <> 'pending')"
    )


def downgrade() -> None:
    op.execute("DROP POLICY ended_rows ON webhook_deliveries")
    op.execute("REVOKE DELETE ON webhook_deliveries FROM app_tenant")
