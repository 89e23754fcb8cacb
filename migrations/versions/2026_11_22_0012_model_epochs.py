"""What a model name refers to belongs to the policy epoch, so that a gateway may keep it for requests of one epoch.

A name that refers to nothing is never kept, so what only lets a name begin to refer to something raises no epoch.
Revision 0012, after 0011.
"""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

# Deferred to the commit: the tenant's row is locked last, after any number of adapters, so that no two transactions deadlock.
TRIGGER = """
CREATE CONSTRAINT TRIGGER bump_policy_epoch {changes} DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW {when} EXECUTE FUNCTION bump_policy_epoch()
"""
# Names refer to ready versions only. One that becomes ready for the first time had no alias yet.
WAS_OR_IS_READY = "'ready' IN (OLD.state, NEW.state) AND OLD.state NOT IN ('uploading', 'validating')"
SERVED_OTHERWISE = (
    "(NEW.state, NEW.tool_style, NEW.defaults) IS DISTINCT FROM (OLD.state, OLD.tool_style, OLD.defaults)"
)
TRIGGERS = {
    "AFTER UPDATE OF name, deleted_at ON adapters": "",
    "AFTER UPDATE OF state, tool_style, defaults ON adapter_versions": f"WHEN ({WAS_OR_IS_READY} AND {SERVED_OTHERWISE})",
    "AFTER UPDATE OF generation OR DELETE ON adapter_aliases": "",
}
TABLES = ("adapters", "adapter_versions", "adapter_aliases")


def upgrade() -> None:
    for changes, when in TRIGGERS.items():
        op.execute(TRIGGER.format(changes=changes, when=when))


def downgrade() -> None:
    for table in TABLES:
        op.execute(f"DROP TRIGGER bump_policy_epoch ON {table}")
