"""Limits at three levels, open reservations, one usage record per request, their totals, and crossed thresholds.

Revision 0005, after 0004.
"""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

QUOTAS = """
CREATE TABLE quotas (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    api_key_id uuid,
    adapter_id uuid,
    requests_per_minute bigint,
    tokens_per_minute bigint,
    concurrent_requests bigint,
    tokens_per_day bigint,
    tokens_per_month bigint,
    budget_per_day bigint,
    budget_per_month bigint,
    max_adapters bigint,
    max_adapter_bytes bigint,
    max_keys bigint,
    revision integer NOT NULL DEFAULT 1,
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_quotas PRIMARY KEY (id),
    CONSTRAINT uq_quotas_tenant_id_api_key_id_adapter_id UNIQUE NULLS NOT DISTINCT (tenant_id, api_key_id, adapter_id),
    CONSTRAINT fk_quotas_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
    CONSTRAINT fk_quotas_tenant_id_api_key_id_api_keys FOREIGN KEY (tenant_id, api_key_id)
        REFERENCES api_keys (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT fk_quotas_tenant_id_adapter_id_adapters FOREIGN KEY (tenant_id, adapter_id)
        REFERENCES adapters (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_quotas_level CHECK (num_nonnulls(api_key_id, adapter_id) <= 1),
    CONSTRAINT ck_quotas_limits CHECK (
        requests_per_minute >= 0 AND tokens_per_minute >= 0 AND concurrent_requests >= 0
        AND tokens_per_day >= 0 AND tokens_per_month >= 0 AND budget_per_day >= 0 AND budget_per_month >= 0
        AND max_adapters >= 0 AND max_adapter_bytes >= 0 AND max_keys >= 0
    )
)
"""
EPOCHS = """
CREATE TABLE admission_epochs (
    tenant_id uuid NOT NULL,
    epoch bigint NOT NULL,
    CONSTRAINT pk_admission_epochs PRIMARY KEY (tenant_id),
    CONSTRAINT fk_admission_epochs_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE
)
"""
RESERVATIONS = """
CREATE TABLE reservations (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    api_key_id uuid NOT NULL,
    adapter_id uuid,
    digest char(64),
    gateway_id uuid NOT NULL,
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    amount_nano bigint NOT NULL,
    day text NOT NULL,
    month text NOT NULL,
    admitted_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_reservations PRIMARY KEY (id),
    CONSTRAINT fk_reservations_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
    CONSTRAINT ck_reservations_amounts CHECK (prompt_tokens >= 0 AND completion_tokens >= 0 AND amount_nano >= 0)
)
"""
USAGE = """
CREATE TABLE usage_records (
    request_id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    api_key_id uuid NOT NULL,
    adapter_id uuid,
    adapter_version integer,
    digest char(64),
    outcome text NOT NULL,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    amount_pico bigint NOT NULL,
    day text NOT NULL,
    month text NOT NULL,
    admitted_at timestamptz NOT NULL,
    settled_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_usage_records PRIMARY KEY (request_id),
    CONSTRAINT fk_usage_records_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_usage_records_outcome CHECK (outcome IN ('completed', 'aborted', 'failed', 'unknown')),
    CONSTRAINT ck_usage_records_amounts CHECK (
        prompt_tokens >= cached_tokens AND cached_tokens >= 0 AND completion_tokens >= 0 AND amount_pico >= 0
    ),
    CONSTRAINT ck_usage_records_periods CHECK (
        day ~ '^(d:\\d{4}-\\d{2}-\\d{2}|m:\\d{4}-\\d{2})$' AND month ~ '^(d:\\d{4}-\\d{2}-\\d{2}|m:\\d{4}-\\d{2})$'
    )
)
"""
TOTALS = """
CREATE TABLE usage_totals (
    tenant_id uuid NOT NULL,
    level text NOT NULL,
    subject_id uuid NOT NULL,
    period text NOT NULL,
    requests bigint NOT NULL,
    tokens bigint NOT NULL,
    amount_nano bigint NOT NULL,
    CONSTRAINT pk_usage_totals PRIMARY KEY (tenant_id, level, subject_id, period),
    CONSTRAINT fk_usage_totals_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_usage_totals_level CHECK (level IN ('tenant', 'key', 'adapter')),
    CONSTRAINT ck_usage_totals_period CHECK (period ~ '^(d:\\d{4}-\\d{2}-\\d{2}|m:\\d{4}-\\d{2})$')
)
"""
EVENTS = """
CREATE TABLE quota_events (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    level text NOT NULL,
    subject_id uuid NOT NULL,
    limit_name text NOT NULL,
    period text NOT NULL,
    threshold integer NOT NULL,
    used bigint NOT NULL,
    limit_value bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_quota_events PRIMARY KEY (id),
    CONSTRAINT uq_quota_events_once UNIQUE (tenant_id, level, subject_id, limit_name, period, threshold),
    CONSTRAINT fk_quota_events_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
    CONSTRAINT ck_quota_events_level CHECK (level IN ('tenant', 'key', 'adapter')),
    CONSTRAINT ck_quota_events_threshold CHECK (threshold IN (80, 100))
)
"""
GATEWAYS = """
CREATE TABLE gateways (
    id uuid NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_gateways PRIMARY KEY (id)
)
"""
INDEXES = (
    "CREATE INDEX ix_reservations_tenant_id_digest ON reservations (tenant_id, digest)",
    "CREATE INDEX ix_reservations_expires_at ON reservations (expires_at)",
    "CREATE INDEX ix_usage_records_tenant_id_request_id ON usage_records (tenant_id, request_id)",
)
LIMITS = (
    "requests_per_minute, tokens_per_minute, concurrent_requests, tokens_per_day, tokens_per_month, "
    "budget_per_day, budget_per_month, max_adapters, max_adapter_bytes, max_keys"
)
REVISION = f"""
CREATE TRIGGER bump_revision BEFORE UPDATE OF {LIMITS} ON quotas FOR EACH ROW EXECUTE FUNCTION bump_revision()
"""
EPOCH = """
CREATE TRIGGER bump_policy_epoch AFTER INSERT OR UPDATE OR DELETE ON quotas
FOR EACH ROW EXECUTE FUNCTION bump_policy_epoch()
"""
KEEP_USAGE = """
CREATE FUNCTION keep_usage_record() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'usage records are never changed' USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
KEEP_USAGE_TRIGGER = """
CREATE TRIGGER keep_usage_record BEFORE UPDATE ON usage_records
FOR EACH ROW EXECUTE FUNCTION keep_usage_record()
"""


def upgrade() -> None:
    for statement in (QUOTAS, EPOCHS, RESERVATIONS, USAGE, TOTALS, EVENTS, GATEWAYS, *INDEXES):
        op.execute(statement)
    for statement in (REVISION, EPOCH, KEEP_USAGE, KEEP_USAGE_TRIGGER):
        op.execute(statement)


def downgrade() -> None:
    for table in ("gateways", "quota_events", "usage_totals", "usage_records", "reservations"):
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP TABLE admission_epochs")
    op.execute("DROP TABLE quotas")
    op.execute("DROP FUNCTION keep_usage_record()")
