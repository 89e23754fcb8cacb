"""Requests that failed or were refused, each with its error and without its content, for a day.

Revision 0035, after 0034.
"""

from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

OWN = "tenant_id = nullif(current_setting('app.tenant_id', true), '')::uuid"
STATEMENTS = (
    """
CREATE TABLE failed_requests (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL,
    at timestamptz NOT NULL,
    is_refused boolean NOT NULL,
    request_id text NOT NULL,
    key_id text NOT NULL,
    adapter_id uuid,
    model text,
    code text NOT NULL,
    status integer NOT NULL,
    message text NOT NULL,
    omitted integer NOT NULL,
    CONSTRAINT pk_failed_requests PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_failed_requests_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
)
""",
    "CREATE INDEX ix_failed_requests_request_id ON failed_requests (tenant_id, request_id)",
    "CREATE INDEX ix_failed_requests_at ON failed_requests (at)",
    "ALTER TABLE failed_requests ENABLE ROW LEVEL SECURITY",
    "ALTER TABLE failed_requests FORCE ROW LEVEL SECURITY",
    f"CREATE POLICY own_rows ON failed_requests TO app_tenant USING ({OWN}) WITH CHECK ({OWN})",
    "CREATE POLICY all_rows ON failed_requests TO app_operator, app_writer USING (true) WITH CHECK (true)",
    "GRANT SELECT ON failed_requests TO app_tenant",
    "GRANT SELECT, DELETE ON failed_requests TO app_operator",
    "GRANT SELECT, INSERT, UPDATE ON failed_requests TO app_writer",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TABLE failed_requests")
