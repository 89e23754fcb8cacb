"""What decides a request has an epoch, and what a client may change has a revision (its ETag).

Revision 0003, after 0002.
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TENANTS = """
ALTER TABLE tenants
    ADD COLUMN tier text NOT NULL DEFAULT 'standard',
    ADD COLUMN policy_epoch bigint NOT NULL DEFAULT 1,
    ADD COLUMN revision integer NOT NULL DEFAULT 1,
    ADD COLUMN deleted_at timestamptz,
    ADD CONSTRAINT ck_tenants_tier CHECK (tier ~ '^[a-z0-9][a-z0-9-]{0,62}$'),
    DROP CONSTRAINT uq_tenants_name
"""
TENANT_NAMES = "CREATE UNIQUE INDEX uq_tenants_live_name ON tenants (name) WHERE deleted_at IS NULL"
API_KEYS = """
ALTER TABLE api_keys
    ADD COLUMN allowed_cidrs text[] NOT NULL DEFAULT '{}'::text[],
    ADD COLUMN created_by text,
    ADD COLUMN last_used_at timestamptz,
    ADD COLUMN revision integer NOT NULL DEFAULT 1,
    ADD CONSTRAINT uq_api_keys_tenant_id_id UNIQUE (tenant_id, id)
"""
ADAPTERS = """
ALTER TABLE adapters
    ADD COLUMN description text NOT NULL DEFAULT '',
    ADD COLUMN revision integer NOT NULL DEFAULT 1
"""
VERSIONS = (
    "ALTER TABLE adapter_versions ADD COLUMN revision integer NOT NULL DEFAULT 1, ADD COLUMN created_by text"
)
BUMP_REVISION = """
CREATE FUNCTION bump_revision() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.revision := OLD.revision + 1;
    RETURN NEW;
END $$
"""
# What a client sees and may change. Last use, epochs and foreign rows do not touch an ETag.
REVISED = {
    "tenants": "name, weight, tier, suspended_at, deleted_at",
    "api_keys": "name, scopes, allowed_cidrs, expires_at, revoked_at, replaced_by",
    "adapters": "description, deleted_at",
    "adapter_versions": "digest, state, report, tool_style, defaults, aliased_at",
}
# The functions run as their owner: whoever may change a key may not change its tenant.
BUMP_EPOCH = """
CREATE FUNCTION bump_policy_epoch() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, public AS $$
BEGIN
    UPDATE public.tenants SET policy_epoch = policy_epoch + 1 WHERE id = coalesce(NEW.tenant_id, OLD.tenant_id);
    RETURN NULL;
END $$
"""
KEY_EPOCH = """
CREATE TRIGGER bump_policy_epoch
AFTER UPDATE OF scopes, allowed_cidrs, expires_at, revoked_at OR DELETE ON api_keys
FOR EACH ROW EXECUTE FUNCTION bump_policy_epoch()
"""
BUMP_TENANT_EPOCH = """
CREATE FUNCTION bump_own_policy_epoch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.policy_epoch := OLD.policy_epoch + 1;
    RETURN NEW;
END $$
"""
TENANT_EPOCH = """
CREATE TRIGGER bump_own_policy_epoch
BEFORE UPDATE OF weight, tier, suspended_at, deleted_at ON tenants
FOR EACH ROW EXECUTE FUNCTION bump_own_policy_epoch()
"""


def upgrade() -> None:
    for statement in (TENANTS, TENANT_NAMES, API_KEYS, ADAPTERS, VERSIONS, BUMP_REVISION):
        op.execute(statement)
    for table, columns in REVISED.items():
        op.execute(
            f"CREATE TRIGGER bump_revision BEFORE UPDATE OF {columns} ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION bump_revision()"
        )
    for statement in (BUMP_EPOCH, KEY_EPOCH, BUMP_TENANT_EPOCH, TENANT_EPOCH):
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TRIGGER bump_own_policy_epoch ON tenants")
    op.execute("DROP TRIGGER bump_policy_epoch ON api_keys")
    for table in REVISED:
        op.execute(f"DROP TRIGGER bump_revision ON {table}")
    for function in ("bump_revision", "bump_policy_epoch", "bump_own_policy_epoch"):
        op.execute(f"DROP FUNCTION {function}()")
    op.execute("ALTER TABLE adapter_versions DROP COLUMN revision, DROP COLUMN created_by")
    op.execute("ALTER TABLE adapters DROP COLUMN description, DROP COLUMN revision")
    op.execute(
        "ALTER TABLE api_keys DROP CONSTRAINT uq_api_keys_tenant_id_id, DROP COLUMN allowed_cidrs, "
        "DROP COLUMN created_by, DROP COLUMN last_used_at, DROP COLUMN revision"
    )
    op.execute("DELETE FROM tenants WHERE deleted_at IS NOT NULL")
    op.execute("DROP INDEX uq_tenants_live_name")
    op.execute(
        "ALTER TABLE tenants DROP COLUMN tier, DROP COLUMN policy_epoch, DROP COLUMN revision, "
        "DROP COLUMN deleted_at, ADD CONSTRAINT uq_tenants_name UNIQUE (name)"
    )
