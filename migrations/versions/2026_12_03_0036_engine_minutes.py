"""What gateways saw of their engines, minute by minute.

Revision 0036, after 0035.
"""

from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

MINUTES = """
CREATE TABLE engine_minutes (
    minute timestamptz NOT NULL,
    gateway uuid NOT NULL,
    number integer NOT NULL,
    seen jsonb NOT NULL,
    CONSTRAINT pk_engine_minutes PRIMARY KEY (minute, gateway, number)
)
"""


def upgrade() -> None:
    op.execute(MINUTES)
    op.execute("GRANT SELECT, INSERT, DELETE ON engine_minutes TO app_operator")


def downgrade() -> None:
    op.execute("DROP TABLE engine_minutes")
