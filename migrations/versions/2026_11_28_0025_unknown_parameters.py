"""A tenant's requests with parameters that this server does not know are refused or served: its own choice or the installation's.

Revision 0025, after 0024.
"""

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

FUNCTIONS = ("bump_own_policy_epoch", "bump_revision")


def upgrade() -> None:
    op.execute(
        "ALTER TABLE tenants ADD COLUMN unknown_parameters text NOT NULL DEFAULT 'default' "
        "CONSTRAINT ck_tenants_unknown_parameters CHECK (unknown_parameters IN ('default', 'refuse', 'report'))"
    )
    for function in FUNCTIONS:
        op.execute(
            f"CREATE TRIGGER unknown_parameters_{function} BEFORE UPDATE OF unknown_parameters ON tenants "
            f"FOR EACH ROW EXECUTE FUNCTION {function}()"
        )


def downgrade() -> None:
    for function in FUNCTIONS:
        op.execute(f"DROP TRIGGER unknown_parameters_{function} ON tenants")
    op.execute("ALTER TABLE tenants DROP COLUMN unknown_parameters")
