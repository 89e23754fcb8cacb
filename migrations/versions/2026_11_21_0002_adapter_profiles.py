"""The profile of an adapter version (tool style and sampling defaults), free to change until its first alias.

Revision 0002, after 0001.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# What an alias names now or named last was in use before there were profiles: it keeps the empty one.
MARK_ALIASED = """
UPDATE adapter_versions SET aliased_at = now() FROM adapter_aliases
WHERE adapter_versions.adapter_id = adapter_aliases.adapter_id
AND adapter_versions.version IN (adapter_aliases.version, adapter_aliases.previous_version)
"""
NOTE_FIRST_ALIAS = """
CREATE FUNCTION note_first_alias() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE adapter_versions SET aliased_at = now()
    WHERE adapter_id = NEW.adapter_id AND version = NEW.version AND aliased_at IS NULL;
    RETURN NULL;
END $$
"""
NOTE_FIRST_ALIAS_TRIGGER = """
CREATE TRIGGER note_first_alias
AFTER INSERT OR UPDATE OF version ON adapter_aliases
FOR EACH ROW EXECUTE FUNCTION note_first_alias()
"""
KEEP_PROFILE_TRIGGER = """
CREATE TRIGGER keep_adapter_profile
BEFORE UPDATE OF tool_style, defaults, aliased_at ON adapter_versions
FOR EACH ROW WHEN (
    OLD.aliased_at IS NOT NULL
    AND (OLD.tool_style, OLD.defaults, OLD.aliased_at) IS DISTINCT FROM (NEW.tool_style, NEW.defaults, NEW.aliased_at)
) EXECUTE FUNCTION keep_adapter_version()
"""


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("tool_style", sa.Text()))
    op.add_column(
        "adapter_versions",
        sa.Column("defaults", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
    )
    op.add_column("adapter_versions", sa.Column("aliased_at", sa.DateTime(timezone=True)))
    op.create_check_constraint(
        op.f("ck_adapter_versions_tool_style"),
        "adapter_versions",
        "tool_style IN ('hermes', 'llama3', 'mistral', 'generic')",
    )
    op.create_check_constraint(
        op.f("ck_adapter_versions_defaults"), "adapter_versions", "jsonb_typeof(defaults) = 'object'"
    )
    op.execute(MARK_ALIASED)
    op.execute(NOTE_FIRST_ALIAS)
    op.execute(NOTE_FIRST_ALIAS_TRIGGER)
    op.execute(KEEP_PROFILE_TRIGGER)


def downgrade() -> None:
    op.execute("DROP TRIGGER keep_adapter_profile ON adapter_versions")
    op.execute("DROP TRIGGER note_first_alias ON adapter_aliases")
    op.execute("DROP FUNCTION note_first_alias()")
    for column in ("aliased_at", "defaults", "tool_style"):
        op.drop_column("adapter_versions", column)
