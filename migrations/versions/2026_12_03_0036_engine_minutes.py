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
    host text NOT NULL,
    address text NOT NULL,
    prompt_tokens bigint NOT NULL,
    generation_tokens bigint NOT NULL,
    running integer NOT NULL,
    waiting integer NOT NULL,
    referenced_blocks bigint NOT NULL,
    total_blocks bigint NOT NULL,
    device_adapters integer NOT NULL,
    host_adapters integer NOT NULL,
    ttft_buckets bigint[] NOT NULL,
    gap_buckets bigint[] NOT NULL,
    CONSTRAINT pk_engine_minutes PRIMARY KEY (minute, gateway, number)
)
"""


def upgrade() -> None:
    op.execute(MINUTES)
    op.execute("GRANT SELECT, INSERT, DELETE ON engine_minutes TO app_operator")


def downgrade() -> None:
    op.execute("DROP TABLE engine_minutes")
