"""The reasoning style of an adapter version, a part of its profile: null, "none", "think" or an own pair of markers.

Revision 0031, after 0030.
"""

from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

CHANGED = "NEW.reasoning_style IS DISTINCT FROM OLD.reasoning_style"
# What the triggers of the other fields of a profile do. Those see a change of the state, so only a ready version matters here.
TRIGGERS = {
    "keep_adapter_version": "CREATE TRIGGER {} BEFORE UPDATE OF reasoning_style ON adapter_versions "
    f"FOR EACH ROW WHEN (OLD.aliased_at IS NOT NULL AND {CHANGED})",
    "bump_revision": "CREATE TRIGGER {} BEFORE UPDATE OF reasoning_style ON adapter_versions FOR EACH ROW",
    "bump_policy_epoch": "CREATE CONSTRAINT TRIGGER {} AFTER UPDATE OF reasoning_style ON adapter_versions "
    f"DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (OLD.state = 'ready' AND {CHANGED})",
}


def upgrade() -> None:
    op.execute(
        "ALTER TABLE adapter_versions ADD COLUMN reasoning_style jsonb CONSTRAINT ck_adapter_versions_reasoning_style "
        """CHECK (reasoning_style IN ('"none"', '"think"') OR jsonb_typeof(reasoning_style) = 'object')"""
    )
    for function, trigger in TRIGGERS.items():
        op.execute(f"{trigger.format(f'reasoning_style_{function}')} EXECUTE FUNCTION {function}()")


def downgrade() -> None:
    for function in TRIGGERS:
        op.execute(f"DROP TRIGGER reasoning_style_{function} ON adapter_versions")
    op.execute("ALTER TABLE adapter_versions DROP COLUMN reasoning_style")
