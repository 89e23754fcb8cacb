"""The ledger in disjoint token classes, in one partition per month; hourly rollups; phases of requests, one partition per day.

Rows of before keep their ids and amounts: uncached = prompt - cached, currency USD, no price version.
Revision 0013, after 0012.
"""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

OWN = "tenant_id = nullif(current_setting('app.tenant_id', true), '')::uuid"
PERIOD = r"^(d:\d{4}-\d{2}-\d{2}|m:\d{4}-\d{2})$"
# Also the constraints, so that the new table's have the names of the models; PostgreSQL 18 names NOT NULL too.
RENAME_TABLE = """
DO $$ DECLARE name text; BEGIN
    DROP TRIGGER keep_usage_record ON usage_records;
    ALTER TABLE usage_records RENAME TO {new_name};
    FOR name IN SELECT conname FROM pg_constraint WHERE conrelid = '{new_name}'::regclass LOOP
        EXECUTE format('ALTER TABLE {new_name} RENAME CONSTRAINT %I TO %I', name, 'x_' || name);
    END LOOP;
END $$
"""
# Forced security binds the owner too, who has to read all rows once.
OWNER_READS = "CREATE POLICY owner_copies ON {table} FOR SELECT TO CURRENT_USER USING (true)"
LEDGER = f"""
CREATE TABLE usage_records (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    kind text NOT NULL DEFAULT 'usage',
    reverses_id uuid,
    reason text,
    client_request_id text,
    api_key_id uuid NOT NULL,
    adapter_id uuid,
    adapter_version integer,
    digest char(64),
    outcome text NOT NULL,
    uncached_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    price_version_id uuid,
    currency char(3) NOT NULL,
    amount_pico bigint NOT NULL,
    day text NOT NULL,
    month text NOT NULL,
    admitted_at timestamptz NOT NULL,
    settled_at timestamptz NOT NULL DEFAULT now(),
    ttft_ms integer,
    duration_ms integer,
    CONSTRAINT pk_usage_records PRIMARY KEY (id),
    CONSTRAINT fk_usage_records_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_usage_records_kind CHECK (kind IN ('usage', 'correction')),
    CONSTRAINT ck_usage_records_correction CHECK (
        num_nonnulls(reverses_id, reason) = CASE kind WHEN 'correction' THEN 2 ELSE 0 END
    ),
    CONSTRAINT ck_usage_records_outcome CHECK (outcome IN ('completed', 'aborted', 'failed', 'unknown')),
    CONSTRAINT ck_usage_records_amounts CHECK (
        kind = 'correction'
        OR uncached_tokens >= 0 AND cached_tokens >= 0 AND completion_tokens >= 0 AND amount_pico >= 0
    ),
    CONSTRAINT ck_usage_records_periods CHECK (day ~ '{PERIOD}' AND month ~ '{PERIOD}')
) PARTITION BY RANGE (id)
"""
ROLLUPS = """
CREATE TABLE usage_rollups (
    tenant_id uuid NOT NULL,
    hour timestamptz NOT NULL,
    adapter_id uuid NOT NULL,
    api_key_id uuid NOT NULL,
    price_version_id uuid NOT NULL,
    currency char(3) NOT NULL,
    requests bigint NOT NULL,
    uncached_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    amount_pico numeric(38,0) NOT NULL,
    CONSTRAINT pk_usage_rollups PRIMARY KEY (tenant_id, hour, adapter_id, api_key_id, price_version_id, currency),
    CONSTRAINT fk_usage_rollups_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
)
"""
REQUEST_ROLLUPS = """
CREATE TABLE request_rollups (
    tenant_id uuid NOT NULL,
    hour timestamptz NOT NULL,
    adapter_id uuid NOT NULL,
    api_key_id uuid NOT NULL,
    status text NOT NULL,
    requests bigint NOT NULL,
    ttft_buckets bigint[] NOT NULL,
    gap_buckets bigint[] NOT NULL,
    CONSTRAINT pk_request_rollups PRIMARY KEY (tenant_id, hour, adapter_id, api_key_id, status),
    CONSTRAINT fk_request_rollups_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_request_rollups_buckets CHECK (cardinality(ttft_buckets) = 16 AND cardinality(gap_buckets) = 16)
)
"""
# The ledger's row refers to the tenant; this one is written with it, and ends first.
PHASES = """
CREATE TABLE request_phases (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    phases jsonb NOT NULL,
    CONSTRAINT pk_request_phases PRIMARY KEY (id)
) PARTITION BY RANGE (id)
"""
INDEXES = (
    "CREATE INDEX ix_usage_records_tenant_id_id ON usage_records (tenant_id, id)",
    "CREATE INDEX ix_usage_records_tenant_id_client_request_id ON usage_records (tenant_id, client_request_id)",
)
PARTITIONED = ("usage_records", "request_phases")
# Nothing is lost to a partition that is missing: of a clock that is far off, or of a month that was dropped.
DEFAULTS = tuple(
    statement
    for table in PARTITIONED
    for statement in (
        f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT",
        f"ALTER TABLE {table}_default ENABLE ROW LEVEL SECURITY",
        f"ALTER TABLE {table}_default FORCE ROW LEVEL SECURITY",
    )
)
FIRST_ID = """
CREATE FUNCTION first_usage_id(at timestamptz) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
    SELECT (lpad(to_hex(floor(extract(epoch FROM at) * 1000)::bigint), 12, '0') || '70008000000000000000')::uuid
$$
"""
# Attaching lets writers go on, where creating a partition in place would stop them.
ADD_PARTITION = """
CREATE FUNCTION add_usage_partition(parent text, at timestamptz) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, public SET timezone = 'UTC' AS $$
DECLARE
    unit text := CASE parent WHEN 'usage_records' THEN 'month' WHEN 'request_phases' THEN 'day' END;
    first timestamptz := date_trunc(unit, at);
    name text := parent || to_char(first, CASE unit WHEN 'month' THEN '_YYYY_MM' ELSE '_YYYY_MM_DD' END);
BEGIN
    IF unit IS NULL THEN
        RAISE EXCEPTION 'no partitions are made of %', parent USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF to_regclass('public.' || name) IS NOT NULL THEN
        RETURN NULL;
    END IF;
    EXECUTE format('CREATE TABLE public.%I (LIKE public.%I INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', name, parent);
    EXECUTE format('ALTER TABLE public.%I ENABLE ROW LEVEL SECURITY', name);
    EXECUTE format('ALTER TABLE public.%I FORCE ROW LEVEL SECURITY', name);
    EXECUTE format('ALTER TABLE public.%I ATTACH PARTITION public.%I FOR VALUES FROM (%L) TO (%L)', parent, name,
        public.first_usage_id(first), public.first_usage_id(first + ('1 ' || unit)::interval));
    RETURN name;
END $$
"""
# The default partition of phases is emptied with each day that is dropped: their retention has no exception.
DROP_PARTITION = """
CREATE FUNCTION drop_usage_partition(parent text, keep integer) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, public SET timezone = 'UTC' AS $$
DECLARE
    first_kept text := parent || CASE parent
        WHEN 'usage_records' THEN to_char(date_trunc('month', now()) - make_interval(months => keep), '_YYYY_MM')
        WHEN 'request_phases' THEN to_char(now() - make_interval(days => keep), '_YYYY_MM_DD') END;
    shortest integer := CASE parent WHEN 'usage_records' THEN 2 ELSE 1 END;
    oldest text;
BEGIN
    IF first_kept IS NULL OR keep < shortest THEN
        RAISE EXCEPTION 'partitions of % are not dropped after %', parent, keep USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT c.relname INTO oldest FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = ('public.' || parent)::regclass AND c.relname ~ '_\\d{4}_\\d{2}' AND c.relname < first_kept
    ORDER BY c.relname LIMIT 1;
    IF oldest IS NOT NULL THEN
        EXECUTE format('DROP TABLE public.%I', oldest);
        IF parent = 'request_phases' THEN
            TRUNCATE public.request_phases_default;
        END IF;
    END IF;
    RETURN oldest;
END $$
"""
MONTHS = """
SELECT add_usage_partition('usage_records', month) FROM generate_series(
    (SELECT date_trunc('month', least(min(admitted_at), now()), 'UTC') FROM former_usage_records),
    now() + interval '2 months', interval '1 month', 'UTC'
) month
"""
DAYS = """
SELECT add_usage_partition('request_phases', day) FROM generate_series(now(), now() + interval '7 days', interval '1 day') day
"""
COPY = """
INSERT INTO usage_records (
    id, tenant_id, api_key_id, adapter_id, adapter_version, digest, outcome, uncached_tokens, cached_tokens,
    completion_tokens, currency, amount_pico, day, month, admitted_at, settled_at
)
SELECT request_id, tenant_id, api_key_id, adapter_id, adapter_version, digest, outcome, prompt_tokens - cached_tokens,
    cached_tokens, completion_tokens, 'USD', amount_pico, day, month, admitted_at, settled_at
FROM former_usage_records
"""
NIL = "'00000000-0000-0000-0000-000000000000'::uuid"
ROLL_UP = (
    f"""
INSERT INTO usage_rollups
SELECT tenant_id, date_trunc('hour', admitted_at, 'UTC'), coalesce(adapter_id, {NIL}), api_key_id, {NIL}, 'USD', count(*),
    sum(prompt_tokens - cached_tokens), sum(cached_tokens), sum(completion_tokens), sum(amount_pico)
FROM former_usage_records GROUP BY 1, 2, 3, 4
""",
    f"""
INSERT INTO request_rollups
SELECT tenant_id, date_trunc('hour', admitted_at, 'UTC'), coalesce(adapter_id, {NIL}), api_key_id, outcome, count(*),
    array_fill(0::bigint, ARRAY[16]), array_fill(0::bigint, ARRAY[16])
FROM former_usage_records GROUP BY 1, 2, 3, 4, 5
""",
)
KEEP_TRIGGER = """
CREATE TRIGGER keep_usage_record BEFORE UPDATE OR DELETE ON usage_records
FOR EACH ROW EXECUTE FUNCTION keep_usage_record()
"""
WRITTEN_ONCE = {"app_tenant": "SELECT", "app_operator": "SELECT", "app_writer": "SELECT, INSERT"}
ADDED_UP = {"app_tenant": "SELECT", "app_operator": "SELECT", "app_writer": "SELECT, INSERT, UPDATE"}
GRANTS = {
    "usage_records": WRITTEN_ONCE,
    "request_phases": WRITTEN_ONCE,
    "usage_rollups": ADDED_UP,
    "request_rollups": ADDED_UP,
}
FUNCTIONS = ("add_usage_partition(text, timestamptz)", "drop_usage_partition(text, integer)")
FORMER = f"""
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
    CONSTRAINT ck_usage_records_periods CHECK (day ~ '{PERIOD}' AND month ~ '{PERIOD}')
)
"""
# A corrected request counts with nothing: the former table knows no corrections.
COPY_BACK = """
INSERT INTO usage_records
SELECT u.id, u.tenant_id, u.api_key_id, u.adapter_id, u.adapter_version, u.digest, u.outcome,
    CASE WHEN c.id IS NULL THEN u.uncached_tokens + u.cached_tokens ELSE 0 END,
    CASE WHEN c.id IS NULL THEN u.cached_tokens ELSE 0 END,
    CASE WHEN c.id IS NULL THEN u.completion_tokens ELSE 0 END,
    CASE WHEN c.id IS NULL THEN u.amount_pico ELSE 0 END, u.day, u.month, u.admitted_at, u.settled_at
FROM later_usage_records u LEFT JOIN later_usage_records c ON c.reverses_id = u.id
WHERE u.kind = 'usage'
"""
FORMER_INDEX = "CREATE INDEX ix_usage_records_tenant_id_request_id ON usage_records (tenant_id, request_id)"
FORMER_TRIGGER = """
CREATE TRIGGER keep_usage_record BEFORE UPDATE ON usage_records
FOR EACH ROW EXECUTE FUNCTION keep_usage_record()
"""


def upgrade() -> None:
    _set_aside("former_usage_records")
    for statement in (LEDGER, ROLLUPS, REQUEST_ROLLUPS, PHASES, *INDEXES, *DEFAULTS):
        op.execute(statement)
    for statement in (FIRST_ID, ADD_PARTITION, DROP_PARTITION, MONTHS, DAYS, COPY, *ROLL_UP):
        op.execute(statement)
    op.execute("DROP TABLE former_usage_records")
    op.execute(KEEP_TRIGGER)
    for table, grants in GRANTS.items():
        _secure(table, grants)
    for function in FUNCTIONS:
        op.execute(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")
        op.execute(f"GRANT EXECUTE ON FUNCTION {function} TO app_operator")


def _set_aside(new_name: str) -> None:
    op.execute(RENAME_TABLE.format(new_name=new_name))
    op.execute(OWNER_READS.format(table=new_name))


def _secure(table: str, grants: dict[str, str]) -> None:
    """Force row-level security. Partitions have neither grants nor policies: no role reaches them but through their table."""
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY own_rows ON {table} TO app_tenant USING ({OWN}) WITH CHECK ({OWN})")
    op.execute(
        f"CREATE POLICY all_rows ON {table} TO app_operator, app_writer USING (true) WITH CHECK (true)"
    )
    for role, what in grants.items():
        op.execute(f"GRANT {what} ON {table} TO {role}")


def downgrade() -> None:
    _set_aside("later_usage_records")
    for statement in (FORMER, COPY_BACK, "DROP TABLE later_usage_records"):
        op.execute(statement)
    op.execute(FORMER_INDEX)
    op.execute(FORMER_TRIGGER)
    _secure("usage_records", WRITTEN_ONCE)
    for function in FUNCTIONS:
        op.execute(f"DROP FUNCTION {function}")
    op.execute("DROP FUNCTION first_usage_id(timestamptz)")
    for table in ("request_phases", "request_rollups", "usage_rollups"):
        op.execute(f"DROP TABLE {table}")
