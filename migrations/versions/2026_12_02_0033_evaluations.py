"""Suites, evaluations of adapter versions with the answers of those that run, and the gates of aliases.

Revision 0033, after 0032.
"""

from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

SUITES = """
CREATE TABLE suites (
    id uuid NOT NULL,
    tenant_id uuid,
    name text NOT NULL,
    sha256 char(64) NOT NULL,
    cases integer NOT NULL,
    size_bytes bigint NOT NULL,
    base_digest text,
    content bytea NOT NULL,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_suites PRIMARY KEY (id),
    CONSTRAINT uq_suites_tenant_id_name UNIQUE NULLS NOT DISTINCT (tenant_id, name),
    CONSTRAINT fk_suites_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
    CONSTRAINT ck_suites_name CHECK (name ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    CONSTRAINT ck_suites_cases CHECK (cases BETWEEN 1 AND 10000)
)
"""
EVALUATIONS = """
CREATE TABLE evaluations (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    adapter_id uuid NOT NULL,
    version integer NOT NULL,
    suite text NOT NULL,
    suite_id uuid,
    suite_sha256 char(64) NOT NULL,
    baseline text,
    profile jsonb NOT NULL,
    seed bigint NOT NULL,
    state text NOT NULL DEFAULT 'queued',
    reason text,
    total integer NOT NULL,
    done integer NOT NULL DEFAULT 0,
    pass_rate double precision,
    baseline_pass_rate double precision,
    system_fingerprint text,
    latency jsonb,
    report bytea,
    report_sha256 char(64),
    key_id text NOT NULL,
    address text,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    claim uuid,
    claimed_until timestamptz,
    CONSTRAINT pk_evaluations PRIMARY KEY (id),
    CONSTRAINT uq_evaluations_tenant_id_id UNIQUE (tenant_id, id),
    CONSTRAINT fk_evaluations_tenant_id_adapter_id_adapters FOREIGN KEY (tenant_id, adapter_id)
        REFERENCES adapters (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT fk_evaluations_suite_id_suites FOREIGN KEY (suite_id) REFERENCES suites (id) ON DELETE SET NULL,
    CONSTRAINT ck_evaluations_state CHECK (state IN ('queued', 'running', 'completed', 'failed', 'cancelled')),
    CONSTRAINT ck_evaluations_report CHECK ((state = 'completed') = (report IS NOT NULL))
)
"""
ANSWERS = """
CREATE TABLE evaluation_answers (
    evaluation_id uuid NOT NULL,
    side integer NOT NULL,
    place integer NOT NULL,
    tenant_id uuid NOT NULL,
    result bytea NOT NULL,
    CONSTRAINT pk_evaluation_answers PRIMARY KEY (evaluation_id, side, place),
    CONSTRAINT fk_evaluation_answers_tenant_id_evaluation_id_evaluations FOREIGN KEY (tenant_id, evaluation_id)
        REFERENCES evaluations (tenant_id, id) ON DELETE CASCADE
)
"""
GATES = """
CREATE TABLE alias_gates (
    adapter_id uuid NOT NULL,
    alias text NOT NULL,
    tenant_id uuid NOT NULL,
    suite text NOT NULL,
    suite_id uuid,
    suite_sha256 char(64) NOT NULL,
    min_pass double precision NOT NULL,
    max_regression double precision,
    changed_by text NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_alias_gates PRIMARY KEY (adapter_id, alias),
    CONSTRAINT fk_alias_gates_adapter_id_alias_adapter_aliases FOREIGN KEY (adapter_id, alias)
        REFERENCES adapter_aliases (adapter_id, alias) ON DELETE CASCADE,
    CONSTRAINT fk_alias_gates_tenant_id_adapter_id_adapters FOREIGN KEY (tenant_id, adapter_id)
        REFERENCES adapters (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT fk_alias_gates_suite_id_suites FOREIGN KEY (suite_id) REFERENCES suites (id),
    CONSTRAINT ck_alias_gates_bounds CHECK (min_pass BETWEEN 0 AND 1 AND max_regression BETWEEN 0 AND 1)
)
"""
INDEXES = (
    "CREATE INDEX ix_evaluations_version ON evaluations (adapter_id, version, suite_sha256)",
    "CREATE INDEX ix_evaluations_open ON evaluations (created_at) WHERE state IN ('queued', 'running')",
    "CREATE INDEX ix_evaluations_tenant_id ON evaluations (tenant_id)",
    "CREATE INDEX ix_alias_gates_tenant_id ON alias_gates (tenant_id)",
)
OWN = "tenant_id = nullif(current_setting('app.tenant_id', true), '')::uuid"
# Of a tenant's transaction alone: without one, nothing is seen.
SHARED = """
CREATE POLICY shared_rows ON suites FOR SELECT TO app_tenant
USING (tenant_id IS NULL AND current_setting('app.tenant_id', true) <> '')
"""
GRANTS = {
    "suites": "SELECT, INSERT, DELETE",
    "evaluations": "SELECT, INSERT, UPDATE (state, ended_at)",
    "evaluation_answers": "SELECT, DELETE",
    "alias_gates": "SELECT, INSERT, UPDATE, DELETE",
}


def upgrade() -> None:
    for statement in (SUITES, EVALUATIONS, ANSWERS, GATES, *INDEXES):
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
    op.execute(SHARED)


def downgrade() -> None:
    for table in ("alias_gates", "evaluation_answers", "evaluations", "suites"):
        op.execute(f"DROP TABLE {table}")
