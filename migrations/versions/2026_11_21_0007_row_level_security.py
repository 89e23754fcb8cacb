"""Three roles without login, and row-level security that holds for the tables' owner too.

Every transaction of a server takes one of the roles: `app_tenant` sees the rows of the one tenant that the transaction
names, `app_operator` manages all of them, `app_writer` keeps the books of requests. Keys are found by one function,
before a tenant is known. The roles belong to the cluster and outlive this database.

Revision 0007, after 0006.
"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ROLES = ("app_tenant", "app_operator", "app_writer")
# Two migrations of two databases may create a cluster's roles at the same time.
CREATE_ROLE = """
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}') THEN
        CREATE ROLE {role} NOLOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$
"""
GRANT_ROLE = """
DO $$ BEGIN
    IF NOT pg_has_role(current_user, '{role}', 'SET') THEN
        GRANT {role} TO CURRENT_USER;
    END IF;
END $$
"""
DROP_ROLE = """
DO $$ BEGIN
    DROP ROLE {role};
EXCEPTION WHEN dependent_objects_still_exist OR insufficient_privilege THEN NULL;
END $$
"""
OWN = "tenant_id = nullif(current_setting('app.tenant_id', true), '')::uuid"
SAME = "id = nullif(current_setting('app.tenant_id', true), '')::uuid"
TENANT_TABLES = (
    "api_keys",
    "adapters",
    "adapter_versions",
    "adapter_aliases",
    "alias_targets",
    "uploads",
    "upload_parts",
    "quotas",
    "admission_epochs",
    "reservations",
    "usage_records",
    "usage_totals",
    "quota_events",
    "audit_entries",
    "idempotency_records",
)
KEY_COLUMNS = (
    "id, tenant_id, key_id, environment, name, scopes, allowed_cidrs, created_by, created_at, expires_at, "
    "revoked_at, last_used_at, revision, replaced_by"
)
# table -> role -> what it may do. A digest of a secret is written, and read by `find_api_key` alone.
GRANTS = {
    "tenants": {
        "app_tenant": "SELECT",
        "app_operator": "SELECT, INSERT, UPDATE, DELETE",
        "app_writer": "SELECT",
    },
    "api_keys": {
        "app_tenant": f"SELECT ({KEY_COLUMNS}), INSERT, "
        "UPDATE (name, scopes, allowed_cidrs, expires_at, revoked_at, replaced_by)",
        "app_operator": f"SELECT ({KEY_COLUMNS}), INSERT, DELETE, "
        "UPDATE (name, scopes, allowed_cidrs, expires_at, revoked_at, replaced_by)",
        "app_writer": f"SELECT ({KEY_COLUMNS}), UPDATE (last_used_at)",
    },
    "adapters": {"app_tenant": "SELECT, INSERT, UPDATE", "app_operator": "SELECT, INSERT, UPDATE, DELETE"},
    "adapter_versions": {
        "app_tenant": "SELECT, INSERT, UPDATE",
        "app_operator": "SELECT, INSERT, UPDATE, DELETE",
    },
    "adapter_aliases": {
        "app_tenant": "SELECT, INSERT, UPDATE, DELETE",
        "app_operator": "SELECT, INSERT, UPDATE, DELETE",
    },
    "alias_targets": {"app_tenant": "SELECT, INSERT", "app_operator": "SELECT, INSERT, DELETE"},
    "uploads": {"app_tenant": "SELECT, INSERT, UPDATE", "app_operator": "SELECT, INSERT, UPDATE, DELETE"},
    "upload_parts": {
        "app_tenant": "SELECT, INSERT, UPDATE, DELETE",
        "app_operator": "SELECT, INSERT, UPDATE, DELETE",
    },
    "quotas": {
        "app_tenant": "SELECT, INSERT, UPDATE, DELETE",
        "app_operator": "SELECT, INSERT, UPDATE, DELETE",
        "app_writer": "SELECT",
    },
    "admission_epochs": {"app_writer": "SELECT, INSERT, UPDATE", "app_operator": "SELECT, DELETE"},
    "reservations": {
        "app_tenant": "SELECT",
        "app_operator": "SELECT, DELETE",
        "app_writer": "SELECT, INSERT, UPDATE, DELETE",
    },
    "usage_records": {"app_tenant": "SELECT", "app_operator": "SELECT", "app_writer": "SELECT, INSERT"},
    "usage_totals": {
        "app_tenant": "SELECT",
        "app_operator": "SELECT",
        "app_writer": "SELECT, INSERT, UPDATE",
    },
    "quota_events": {
        "app_tenant": "SELECT",
        "app_operator": "SELECT, DELETE",
        "app_writer": "SELECT, INSERT",
    },
    "gateways": {"app_operator": "SELECT", "app_writer": "SELECT, INSERT, UPDATE, DELETE"},
    "audit_entries": {"app_tenant": "SELECT, INSERT", "app_operator": "SELECT, INSERT, DELETE"},
    "idempotency_records": {
        "app_tenant": "SELECT, INSERT, UPDATE, DELETE",
        "app_operator": "SELECT, INSERT, UPDATE, DELETE",
    },
}
FIND_KEY = """
CREATE FUNCTION find_api_key(presented_key_id text) RETURNS TABLE (
    api_key_id uuid, key_id text, environment text, secret_sha256 bytea, scopes text[], allowed_cidrs text[],
    expires_at timestamptz, revoked_at timestamptz, tenant_id uuid, tenant_name text, weight double precision,
    tier text, suspended_at timestamptz, policy_epoch bigint
) LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public AS $$
    SELECT k.id, k.key_id, k.environment, k.secret_sha256, k.scopes, k.allowed_cidrs, k.expires_at, k.revoked_at,
        t.id, t.name, t.weight, t.tier, t.suspended_at, t.policy_epoch
    FROM public.api_keys k LEFT JOIN public.tenants t ON t.id = k.tenant_id
    WHERE k.key_id = presented_key_id AND t.deleted_at IS NULL
$$
"""
# The owner runs the functions that cross tenants; forced security holds it to exactly what they need.
OWNER_POLICIES = (
    "CREATE POLICY owner_finds_keys ON api_keys FOR SELECT TO CURRENT_USER USING (true)",
    "CREATE POLICY owner_finds_tenants ON tenants FOR SELECT TO CURRENT_USER USING (true)",
    "CREATE POLICY owner_bumps_epochs ON tenants FOR UPDATE TO CURRENT_USER USING (true)",
)


def upgrade() -> None:
    for role in ROLES:
        op.execute(CREATE_ROLE.format(role=role))
        op.execute(GRANT_ROLE.format(role=role))
        op.execute(f"GRANT USAGE ON SCHEMA public TO {role}")
    for table, grants in GRANTS.items():
        for role, what in grants.items():
            op.execute(f"GRANT {what} ON {table} TO {role}")
    for table in ("tenants", *TENANT_TABLES):
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        own = SAME if table == "tenants" else OWN
        if table == "quotas":
            _narrow_quotas()
        else:
            op.execute(f"CREATE POLICY own_rows ON {table} TO app_tenant USING ({own}) WITH CHECK ({own})")
        op.execute(
            f"CREATE POLICY all_rows ON {table} TO app_operator, app_writer USING (true) WITH CHECK (true)"
        )
    for statement in OWNER_POLICIES:
        op.execute(statement)
    op.execute(FIND_KEY)
    op.execute("REVOKE ALL ON FUNCTION find_api_key(text) FROM PUBLIC")
    op.execute("GRANT EXECUTE ON FUNCTION find_api_key(text) TO app_writer, app_operator")


def _narrow_quotas() -> None:
    """A tenant sees all its limits and sets those of its keys and adapters; its own are the operator's."""
    narrowed = f"{OWN} AND num_nonnulls(api_key_id, adapter_id) = 1"
    op.execute(f"CREATE POLICY own_rows ON quotas FOR SELECT TO app_tenant USING ({OWN})")
    op.execute(f"CREATE POLICY narrowed_insert ON quotas FOR INSERT TO app_tenant WITH CHECK ({narrowed})")
    op.execute(
        f"CREATE POLICY narrowed_update ON quotas FOR UPDATE TO app_tenant USING ({narrowed}) WITH CHECK ({narrowed})"
    )
    op.execute(f"CREATE POLICY narrowed_delete ON quotas FOR DELETE TO app_tenant USING ({narrowed})")


def downgrade() -> None:
    op.execute("DROP FUNCTION find_api_key(text)")
    for name, table in (("keys", "api_keys"), ("tenants", "tenants")):
        op.execute(f"DROP POLICY owner_finds_{name} ON {table}")
    op.execute("DROP POLICY owner_bumps_epochs ON tenants")
    for table in ("tenants", *TENANT_TABLES):
        op.execute(f"DROP POLICY all_rows ON {table}")
        op.execute(f"DROP POLICY own_rows ON {table}")
        op.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    for name in ("insert", "update", "delete"):
        op.execute(f"DROP POLICY narrowed_{name} ON quotas")
    for role in ROLES:
        op.execute(f"DROP OWNED BY {role}")
        op.execute(DROP_ROLE.format(role=role))
