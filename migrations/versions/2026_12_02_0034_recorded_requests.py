"""What tenants let be kept of their requests, and the requests that are recorded for them.

Revision 0034, after 0033.
"""

from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

POLICIES = """
CREATE TABLE data_policies (
    tenant_id uuid NOT NULL,
    record_requests jsonb,
    revision integer NOT NULL DEFAULT 1,
    CONSTRAINT pk_data_policies PRIMARY KEY (tenant_id),
    CONSTRAINT fk_data_policies_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE
)
"""
BUMP = "CREATE TRIGGER bump_revision BEFORE UPDATE OF record_requests ON data_policies FOR EACH ROW EXECUTE FUNCTION bump_revision()"
REQUESTS = """
CREATE TABLE recorded_requests (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    adapter text,
    base_digest text NOT NULL,
    content bytea NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_recorded_requests PRIMARY KEY (id),
    CONSTRAINT fk_recorded_requests_tenant_id_data_policies FOREIGN KEY (tenant_id)
        REFERENCES data_policies (tenant_id) ON DELETE CASCADE
)
"""
INDEXES = (
    "CREATE INDEX ix_recorded_requests_tenant_id ON recorded_requests (tenant_id, id)",
    "CREATE INDEX ix_recorded_requests_expires_at ON recorded_requests (expires_at)",
)
OWN = "tenant_id = nullif(current_setting('app.tenant_id', true), '')::uuid"
GRANTS = {
    "data_policies": "SELECT, INSERT, UPDATE",
    "recorded_requests": "SELECT, DELETE, UPDATE (expires_at)",
}


def upgrade() -> None:
    for statement in (POLICIES, BUMP, REQUESTS, *INDEXES):
        op.execute(statement)
    for table, grants in GRANTS.items():
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY own_rows ON {table} TO app_tenant USING ({OWN}) WITH CHECK ({OWN})")
        op.execute(
            f"CREATE POLICY all_rows ON {table} TO app_operator, app_writer USING (true) WITH CHECK (true)"
        )
        op.execute(f"GRANT {grants} ON {table} TO app_tenant")
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO app_operator")


def downgrade() -> None:
    for table in ("recorded_requests", "data_policies"):
        op.execute(f"DROP TABLE {table}")
