"""The outbox: events of a tenant, its webhook endpoints, the deliveries of one to the other, and exported meter events.

Crossed budgets and states of adapter versions become events in the transaction that writes them.
Revision 0017, after 0016.
"""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

TYPES = "'quota.threshold', 'adapter.ready', 'adapter.rejected', 'adapter.quarantined', 'invoice.finalized'"
ENDPOINTS = f"""
CREATE TABLE webhook_endpoints (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    url text NOT NULL,
    events text[] NOT NULL,
    sealed_secret bytea NOT NULL,
    previous_secret bytea,
    previous_until timestamptz,
    revision integer NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_webhook_endpoints PRIMARY KEY (id),
    CONSTRAINT uq_webhook_endpoints_tenant_id_id UNIQUE (tenant_id, id),
    CONSTRAINT fk_webhook_endpoints_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
    CONSTRAINT ck_webhook_endpoints_events CHECK (cardinality(events) >= 1 AND events <@ ARRAY[{TYPES}]),
    CONSTRAINT ck_webhook_endpoints_previous CHECK ((previous_secret IS NULL) = (previous_until IS NULL))
)
"""
EVENTS = f"""
CREATE TABLE outbox_events (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    type text NOT NULL,
    subject text NOT NULL,
    data jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    dispatched_at timestamptz,
    CONSTRAINT pk_outbox_events PRIMARY KEY (id),
    CONSTRAINT uq_outbox_events_tenant_id_id UNIQUE (tenant_id, id),
    CONSTRAINT fk_outbox_events_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
    CONSTRAINT ck_outbox_events_type CHECK (type IN ({TYPES}))
)
"""
DELIVERIES = """
CREATE TABLE webhook_deliveries (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    tenant_id uuid NOT NULL,
    event_id uuid NOT NULL,
    endpoint_id uuid NOT NULL,
    state text NOT NULL DEFAULT 'pending',
    attempts integer NOT NULL DEFAULT 0,
    attempts_left integer NOT NULL,
    due_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    last_attempt_at timestamptz,
    last_status integer,
    last_error text,
    created_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    CONSTRAINT pk_webhook_deliveries PRIMARY KEY (id),
    CONSTRAINT uq_webhook_deliveries_event_id_endpoint_id UNIQUE (event_id, endpoint_id),
    CONSTRAINT fk_webhook_deliveries_tenant_id_event_id_outbox_events
        FOREIGN KEY (tenant_id, event_id) REFERENCES outbox_events (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT fk_webhook_deliveries_tenant_id_endpoint_id_webhook_endpoints
        FOREIGN KEY (tenant_id, endpoint_id) REFERENCES webhook_endpoints (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_webhook_deliveries_state CHECK (state IN ('pending', 'delivered', 'dead')),
    CONSTRAINT ck_webhook_deliveries_attempts CHECK (attempts >= 0 AND attempts_left >= 0),
    CONSTRAINT ck_webhook_deliveries_ended CHECK ((state = 'pending') = (ended_at IS NULL))
)
"""
EXPORTS = """
CREATE TABLE meter_exports (
    id bigint GENERATED ALWAYS AS IDENTITY,
    tenant_id uuid NOT NULL,
    hour timestamptz NOT NULL,
    meter text NOT NULL,
    sequence integer NOT NULL,
    value bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    sent_at timestamptz,
    CONSTRAINT pk_meter_exports PRIMARY KEY (id),
    CONSTRAINT uq_meter_exports_tenant_id_hour_meter_sequence UNIQUE (tenant_id, hour, meter, sequence),
    CONSTRAINT fk_meter_exports_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_meter_exports_meter CHECK (meter IN ('prompt', 'cached_prompt', 'completion')),
    CONSTRAINT ck_meter_exports_value CHECK (value <> 0 AND sequence >= 1)
)
"""
INDEXES = (
    "CREATE INDEX ix_outbox_events_undispatched ON outbox_events (created_at) WHERE dispatched_at IS NULL",
    "CREATE INDEX ix_outbox_events_created_at ON outbox_events (created_at)",
    "CREATE INDEX ix_webhook_deliveries_pending ON webhook_deliveries (tenant_id, due_at) WHERE state = 'pending'",
    "CREATE INDEX ix_webhook_deliveries_endpoint_id_created_at ON webhook_deliveries (endpoint_id, created_at, id)",
    "CREATE INDEX ix_meter_exports_unsent ON meter_exports (id) WHERE sent_at IS NULL",
    "CREATE INDEX ix_meter_exports_hour ON meter_exports (hour)",
)
REVISION = """
CREATE TRIGGER bump_revision BEFORE UPDATE OF url, events, sealed_secret ON webhook_endpoints
FOR EACH ROW EXECUTE FUNCTION bump_revision()
"""
# The first 16 bytes of SHA-256 as a UUID of version 8 (RFC 9562, section 5.8): repeating what is reported repeats the id.
EVENT_ID = """
CREATE FUNCTION outbox_event_id(tenant_id uuid, type text, subject text) RETURNS uuid
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog AS $$
    SELECT encode(
        set_byte(
            set_byte(hash, 6, get_byte(hash, 6) & 15 | 128),
            8, get_byte(hash, 8) & 63 | 128
        ), 'hex')::uuid
    FROM (
        SELECT substring(sha256(convert_to(concat_ws('/', tenant_id, type, subject), 'UTF8')) FOR 16) AS hash
    ) AS event
$$
"""
# The functions run as their owner: who settles a request or moves a version may neither read names nor write events.
REPORT_THRESHOLD = """
CREATE FUNCTION report_threshold() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, public AS $$
BEGIN
    INSERT INTO public.outbox_events (id, tenant_id, type, subject, data)
    SELECT public.outbox_event_id(NEW.tenant_id, 'quota.threshold', subject), NEW.tenant_id, 'quota.threshold', subject,
        jsonb_build_object(
            'level', NEW.level,
            'name', coalesce(
                (SELECT key_id FROM public.api_keys WHERE NEW.level = 'key' AND id = NEW.subject_id),
                (SELECT name FROM public.adapters WHERE NEW.level = 'adapter' AND id = NEW.subject_id)
            ),
            'limit_name', NEW.limit_name, 'period', NEW.period, 'threshold', NEW.threshold,
            'used', NEW.used, 'limit', NEW.limit_value
        )
    FROM concat_ws('/', NEW.level, NEW.subject_id, NEW.limit_name, NEW.period, NEW.threshold) AS subject
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$
"""
REPORT_VERSION = """
CREATE FUNCTION report_version_state() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, public AS $$
BEGIN
    INSERT INTO public.outbox_events (id, tenant_id, type, subject, data)
    SELECT public.outbox_event_id(NEW.tenant_id, kind, subject), NEW.tenant_id, kind, subject,
        jsonb_build_object(
            'adapter', (SELECT name FROM public.adapters WHERE id = NEW.adapter_id),
            'version', NEW.version, 'digest', NEW.digest, 'state', NEW.state, 'previous_state', OLD.state
        )
    FROM concat('adapter.', NEW.state) AS kind, concat_ws('/', NEW.id, NEW.revision) AS subject
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$
"""
TRIGGERS = (
    "CREATE TRIGGER report_threshold AFTER INSERT ON quota_events FOR EACH ROW EXECUTE FUNCTION report_threshold()",
    """
    CREATE TRIGGER report_version_state AFTER UPDATE OF state ON adapter_versions FOR EACH ROW
    WHEN (NEW.state IN ('ready', 'rejected', 'quarantined') AND NEW.state <> OLD.state)
    EXECUTE FUNCTION report_version_state()
    """,
)
OWNER_POLICIES = (
    "CREATE POLICY owner_finds_adapters ON adapters FOR SELECT TO CURRENT_USER USING (true)",
    "CREATE POLICY owner_adds_events ON outbox_events FOR INSERT TO CURRENT_USER WITH CHECK (true)",
)
OWN = "tenant_id = nullif(current_setting('app.tenant_id', true), '')::uuid"
ALL = "SELECT, INSERT, UPDATE, DELETE"
GRANTS = {
    "webhook_endpoints": {
        "app_tenant": "SELECT, INSERT, DELETE, UPDATE (url, events, sealed_secret, previous_secret, previous_until)",
        "app_operator": ALL,
    },
    "outbox_events": {"app_tenant": "SELECT", "app_operator": ALL},
    "webhook_deliveries": {
        "app_tenant": "SELECT, UPDATE (state, ended_at, due_at, attempts_left, expires_at)",
        "app_operator": ALL,
    },
    "meter_exports": {"app_tenant": "SELECT", "app_operator": ALL},
}


def upgrade() -> None:
    for statement in (ENDPOINTS, EVENTS, DELIVERIES, EXPORTS, *INDEXES, REVISION):
        op.execute(statement)
    for table, grants in GRANTS.items():
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY own_rows ON {table} TO app_tenant USING ({OWN}) WITH CHECK ({OWN})")
        op.execute(
            f"CREATE POLICY all_rows ON {table} TO app_operator, app_writer USING (true) WITH CHECK (true)"
        )
        for role, rights in grants.items():
            op.execute(f"GRANT {rights} ON {table} TO {role}")
    for statement in (EVENT_ID, REPORT_THRESHOLD, REPORT_VERSION, *OWNER_POLICIES, *TRIGGERS):
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TRIGGER report_version_state ON adapter_versions")
    op.execute("DROP TRIGGER report_threshold ON quota_events")
    op.execute("DROP POLICY owner_finds_adapters ON adapters")
    for table in ("meter_exports", "webhook_deliveries", "outbox_events", "webhook_endpoints"):
        op.execute(f"DROP TABLE {table}")
    for function in ("report_version_state()", "report_threshold()", "outbox_event_id(uuid, text, text)"):
        op.execute(f"DROP FUNCTION {function}")
