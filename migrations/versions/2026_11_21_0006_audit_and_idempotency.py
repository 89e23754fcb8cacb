"""The audit log, which only grows, and the answers to requests that may be repeated.

Revision 0006, after 0005.
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

AUDIT = """
CREATE TABLE audit_entries (
    id uuid NOT NULL,
    tenant_id uuid,
    at timestamptz NOT NULL DEFAULT now(),
    actor_kind text NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    target text NOT NULL,
    before jsonb,
    after jsonb,
    address inet,
    request_id text,
    CONSTRAINT pk_audit_entries PRIMARY KEY (id),
    CONSTRAINT fk_audit_entries_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_audit_entries_actor_kind CHECK (actor_kind IN ('key', 'operator', 'command', 'system'))
)
"""
# Retention may remove what is older than a day; nobody may remove what has just been written.
KEEP_AUDIT = """
CREATE FUNCTION keep_audit_entry() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND OLD.at < now() - interval '1 day' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'the audit log only grows' USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
KEEP_AUDIT_TRIGGER = """
CREATE TRIGGER keep_audit_entry BEFORE UPDATE OR DELETE ON audit_entries
FOR EACH ROW EXECUTE FUNCTION keep_audit_entry()
"""
IDEMPOTENCY = """
CREATE TABLE idempotency_records (
    caller text NOT NULL,
    idempotency_key text NOT NULL,
    tenant_id uuid,
    route text NOT NULL,
    body_sha256 bytea NOT NULL,
    status integer,
    sealed_answer bytea,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_idempotency_records PRIMARY KEY (caller, idempotency_key),
    CONSTRAINT fk_idempotency_records_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
    CONSTRAINT ck_idempotency_records_body_sha256 CHECK (octet_length(body_sha256) = 32),
    CONSTRAINT ck_idempotency_records_answer CHECK ((status IS NULL) = (sealed_answer IS NULL))
)
"""
INDEXES = (
    "CREATE INDEX ix_audit_entries_tenant_id_id ON audit_entries (tenant_id, id)",
    "CREATE INDEX ix_idempotency_records_expires_at ON idempotency_records (expires_at)",
    "CREATE INDEX ix_idempotency_records_tenant_id ON idempotency_records (tenant_id)",
)


def upgrade() -> None:
    for statement in (AUDIT, KEEP_AUDIT, KEEP_AUDIT_TRIGGER, IDEMPOTENCY, *INDEXES):
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TABLE idempotency_records")
    op.execute("DROP TABLE audit_entries")
    op.execute("DROP FUNCTION keep_audit_entry()")
