"""A tenant has its own default maximum of tokens: what a chat answer may have whose request names none.

Revision 0023, after 0022.
"""

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

LIMITS = (
    "requests_per_minute, tokens_per_minute, concurrent_requests, tokens_per_day, tokens_per_month, "
    "budget_per_day, budget_per_month, max_adapters, max_adapter_bytes, max_keys"
)
REVISION = (
    "CREATE TRIGGER bump_revision BEFORE UPDATE OF {} ON quotas FOR EACH ROW EXECUTE FUNCTION bump_revision()"
)


def upgrade() -> None:
    op.execute(
        "ALTER TABLE quotas ADD COLUMN default_max_tokens integer "
        "CONSTRAINT ck_quotas_default_max_tokens CHECK (default_max_tokens >= 0)"
    )
    op.execute("DROP TRIGGER bump_revision ON quotas")
    op.execute(REVISION.format(f"{LIMITS}, default_max_tokens"))


def downgrade() -> None:
    op.execute("DROP TRIGGER bump_revision ON quotas")
    op.execute("ALTER TABLE quotas DROP COLUMN default_max_tokens")
    op.execute(REVISION.format(LIMITS))
