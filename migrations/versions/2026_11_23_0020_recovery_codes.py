"""Recovery codes: each takes the place of one code of the second factor at one sign-in. A used code has no row any more.

Revision 0020, after 0019.
"""

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

RECOVERY_CODES = """
CREATE TABLE recovery_codes (
    user_id uuid NOT NULL,
    code_digest bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_recovery_codes PRIMARY KEY (user_id, code_digest),
    CONSTRAINT fk_recovery_codes_user_id_users FOREIGN KEY (user_id) REFERENCES users (id) ON DELETE CASCADE,
    CONSTRAINT ck_recovery_codes_code_digest CHECK (octet_length(code_digest) = 32)
)
"""


def upgrade() -> None:
    op.execute(RECOVERY_CODES)
    # As with other secrets of people, `app_writer` alone reads them.
    op.execute("GRANT SELECT, INSERT, DELETE ON recovery_codes TO app_writer")


def downgrade() -> None:
    op.execute("DROP TABLE recovery_codes")
