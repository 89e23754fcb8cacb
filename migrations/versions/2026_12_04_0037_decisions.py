"""How an adapter version reads the options of a decision, a part of its profile, and the calibrations of its probabilities.

Revision 0037, after 0036.
"""

from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None

CHANGED = "NEW.decision IS DISTINCT FROM OLD.decision"
# As the triggers of reasoning_style in revision 0031.
TRIGGERS = {
    "keep_adapter_version": "CREATE TRIGGER {} BEFORE UPDATE OF decision ON adapter_versions "
    f"FOR EACH ROW WHEN (OLD.aliased_at IS NOT NULL AND {CHANGED})",
    "bump_revision": "CREATE TRIGGER {} BEFORE UPDATE OF decision ON adapter_versions FOR EACH ROW",
    "bump_policy_epoch": "CREATE CONSTRAINT TRIGGER {} AFTER UPDATE OF decision ON adapter_versions "
    f"DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (OLD.state = 'ready' AND {CHANGED})",
}
CALIBRATIONS = """
CREATE TABLE decision_calibrations (
    tenant_id uuid NOT NULL,
    digest char(64) NOT NULL,
    system_fingerprint text NOT NULL,
    format text NOT NULL,
    read text NOT NULL,
    temperatures jsonb NOT NULL,
    report jsonb NOT NULL,
    sha256 char(64) NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_decision_calibrations PRIMARY KEY (tenant_id, digest, system_fingerprint, format, read),
    CONSTRAINT fk_decision_calibrations_tenant_id_tenants FOREIGN KEY (tenant_id)
        REFERENCES tenants (id) ON DELETE CASCADE
)
"""
EPOCH = (
    "CREATE CONSTRAINT TRIGGER bump_policy_epoch AFTER INSERT OR UPDATE ON decision_calibrations "
    "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION bump_policy_epoch()"
)
OWN = "tenant_id = nullif(current_setting('app.tenant_id', true), '')::uuid"


def upgrade() -> None:
    op.execute(
        "ALTER TABLE adapter_versions ADD COLUMN decision jsonb CONSTRAINT ck_adapter_versions_decision "
        "CHECK (decision->>'read' IN ('labels', 'values'))"
    )
    for function, trigger in TRIGGERS.items():
        op.execute(f"{trigger.format(f'decision_{function}')} EXECUTE FUNCTION {function}()")
    for statement in (CALIBRATIONS, EPOCH):
        op.execute(statement)
    for mode in ("ENABLE", "FORCE"):
        op.execute(f"ALTER TABLE decision_calibrations {mode} ROW LEVEL SECURITY")
    op.execute(
        f"CREATE POLICY own_rows ON decision_calibrations TO app_tenant USING ({OWN}) WITH CHECK ({OWN})"
    )
    op.execute(
        "CREATE POLICY all_rows ON decision_calibrations TO app_operator, app_writer USING (true) WITH CHECK (true)"
    )
    op.execute("GRANT SELECT, INSERT, UPDATE ON decision_calibrations TO app_tenant")
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON decision_calibrations TO app_operator")


def downgrade() -> None:
    op.execute("DROP TABLE decision_calibrations")
    for function in TRIGGERS:
        op.execute(f"DROP TRIGGER decision_{function} ON adapter_versions")
    op.execute("ALTER TABLE adapter_versions DROP COLUMN decision")
