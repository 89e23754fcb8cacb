"""The fingerprint of the server secret: a gateway with another secret is refused, instead of losing what the secret seals.

Revision 0026, after 0025.
"""

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

INSTALLATION = """
CREATE TABLE installation (
    is_only_row boolean NOT NULL DEFAULT true,
    secret_fingerprint bytea NOT NULL,
    recognized_since timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_installation PRIMARY KEY (is_only_row),
    CONSTRAINT ck_installation_is_only_row CHECK (is_only_row),
    CONSTRAINT ck_installation_secret_fingerprint CHECK (octet_length(secret_fingerprint) = 32)
)
"""


def upgrade() -> None:
    op.execute(INSTALLATION)
    op.execute("GRANT SELECT, INSERT, UPDATE ON installation TO app_operator")


def downgrade() -> None:
    op.execute("DROP TABLE installation")
