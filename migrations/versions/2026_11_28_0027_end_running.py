"""Suspensions, revocations and forced deletions end what runs: fences say whose requests, which end as `revoked`.

Revision 0027, after 0026.
"""

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

FENCED = ("api_keys", "adapter_versions")
GRANTS = (
    "GRANT SELECT (ended_fence) ON api_keys TO app_tenant, app_operator",
    "GRANT SELECT (ended_fence), UPDATE (ended_fence) ON api_keys TO app_writer",
    "GRANT SELECT (tenant_id, adapter_id, version, ended_fence), UPDATE (ended_fence) ON adapter_versions TO app_writer",
)
# Not validated: all rows satisfy the narrower check that it replaces, and the ledger may be too large to be read under a lock.
OUTCOMES = (
    "ALTER TABLE usage_records DROP CONSTRAINT ck_usage_records_outcome, "
    "ADD CONSTRAINT ck_usage_records_outcome CHECK (outcome IN ({})) NOT VALID"
)
BEFORE = "'completed', 'aborted', 'failed', 'unknown'"


def upgrade() -> None:
    op.execute("ALTER TABLE admission_epochs ADD COLUMN ended_policy_epoch bigint NOT NULL DEFAULT 0")
    for table in FENCED:
        op.execute(f"ALTER TABLE {table} ADD COLUMN ended_fence bigint")
        op.execute(
            f"CREATE INDEX ix_{table}_ended_fence ON {table} (tenant_id, ended_fence) WHERE ended_fence IS NOT NULL"
        )
    for statement in GRANTS:
        op.execute(statement)
    op.execute(OUTCOMES.format("'completed', 'aborted', 'failed', 'revoked', 'unknown'"))


def downgrade() -> None:
    # A ledger row never changes; one that ended so remains, and the check holds for later rows.
    op.execute(OUTCOMES.format(BEFORE))
    for table in FENCED:
        op.execute(f"DROP INDEX ix_{table}_ended_fence")
        op.execute(f"ALTER TABLE {table} DROP COLUMN ended_fence")
    op.execute("ALTER TABLE admission_epochs DROP COLUMN ended_policy_epoch")
