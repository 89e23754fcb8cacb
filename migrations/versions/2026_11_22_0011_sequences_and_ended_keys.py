"""An open request says how many sequences it runs. Retention finds ended keys without reading all, and changes no policy.

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

REPLACED_KEYS = "CREATE INDEX ix_api_keys_replaced_by ON api_keys (replaced_by) WHERE replaced_by IS NOT NULL"
EXECUTE = "EXECUTE FUNCTION bump_policy_epoch()"
BUMP = f"FOR EACH ROW {EXECUTE}"
KEY_CHANGES = "UPDATE OF scopes, allowed_cidrs, expires_at, revoked_at"
# An ended key authenticates no caller, and limits that are deleted with a key limit none.
LIVE = "WHEN (OLD.revoked_at IS NULL AND (OLD.expires_at IS NULL OR OLD.expires_at > now()))"
BY_ITSELF = "WHEN (pg_trigger_depth() = 0)"
EPOCHS = (
    "DROP TRIGGER bump_policy_epoch ON api_keys",
    "DROP TRIGGER bump_policy_epoch ON quotas",
    f"CREATE TRIGGER bump_policy_epoch AFTER {KEY_CHANGES} ON api_keys {BUMP}",
    f"CREATE TRIGGER bump_policy_epoch_of_deleted AFTER DELETE ON api_keys FOR EACH ROW {LIVE} {EXECUTE}",
    f"CREATE TRIGGER bump_policy_epoch AFTER INSERT OR UPDATE ON quotas {BUMP}",
    f"CREATE TRIGGER bump_policy_epoch_of_deleted AFTER DELETE ON quotas FOR EACH ROW {BY_ITSELF} {EXECUTE}",
)
EPOCHS_BEFORE = (
    "DROP TRIGGER bump_policy_epoch_of_deleted ON quotas",
    "DROP TRIGGER bump_policy_epoch_of_deleted ON api_keys",
    "DROP TRIGGER bump_policy_epoch ON quotas",
    "DROP TRIGGER bump_policy_epoch ON api_keys",
    f"CREATE TRIGGER bump_policy_epoch AFTER {KEY_CHANGES} OR DELETE ON api_keys {BUMP}",
    f"CREATE TRIGGER bump_policy_epoch AFTER INSERT OR UPDATE OR DELETE ON quotas {BUMP}",
)


def upgrade() -> None:
    for statement in (SEQUENCES, ENDED_KEYS, REPLACED_KEYS, *EPOCHS):
        op.execute(statement)


def downgrade() -> None:
    for statement in EPOCHS_BEFORE:
        op.execute(statement)
    op.execute("DROP INDEX ix_api_keys_replaced_by")
    op.execute("DROP INDEX ix_api_keys_ended_at")
    op.execute("ALTER TABLE reservations DROP COLUMN sequences")
