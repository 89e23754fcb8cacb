"""Monthly rollups: what an invoice bills of a month, in as many rows as it has lines rather than in a month of hours.

A trigger adds each statement's new rows of the ledger, those of a gateway of an earlier version too. Revision 0019, after 0018.
"""

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

OWN = "tenant_id = nullif(current_setting('app.tenant_id', true), '')::uuid"
NIL = "'00000000-0000-0000-0000-000000000000'::uuid"
ROLLUPS = """
CREATE TABLE monthly_rollups (
    tenant_id uuid NOT NULL,
    month timestamptz NOT NULL,
    adapter_id uuid NOT NULL,
    price_version_id uuid NOT NULL,
    currency char(3) NOT NULL,
    requests bigint NOT NULL,
    uncached_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    amount_pico numeric(38,0) NOT NULL,
    CONSTRAINT pk_monthly_rollups PRIMARY KEY (tenant_id, month, adapter_id, price_version_id, currency),
    CONSTRAINT fk_monthly_rollups_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
)
"""
# Rows are locked in the order of their keys, after all that the statement itself locks: two statements never deadlock.
ADD = f"""
CREATE FUNCTION add_to_monthly_rollups() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO monthly_rollups AS u (
        tenant_id, month, adapter_id, price_version_id, currency, requests, uncached_tokens, cached_tokens,
        completion_tokens, amount_pico
    )
    SELECT w.tenant_id, date_trunc('month', w.admitted_at, 'UTC'), coalesce(w.adapter_id, {NIL}),
        coalesce(w.price_version_id, {NIL}), w.currency, count(*) FILTER (WHERE w.kind = 'usage'),
        sum(w.uncached_tokens), sum(w.cached_tokens), sum(w.completion_tokens), sum(w.amount_pico)
    FROM written w GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
    ON CONFLICT (tenant_id, month, adapter_id, price_version_id, currency) DO UPDATE SET
        requests = u.requests + excluded.requests, uncached_tokens = u.uncached_tokens + excluded.uncached_tokens,
        cached_tokens = u.cached_tokens + excluded.cached_tokens,
        completion_tokens = u.completion_tokens + excluded.completion_tokens,
        amount_pico = u.amount_pico + excluded.amount_pico;
    RETURN NULL;
END $$
"""
# Creating it stops all that insert until the commit, so that no row is missed or counted twice.
TRIGGER = """
CREATE TRIGGER add_to_monthly_rollups AFTER INSERT ON usage_records REFERENCING NEW TABLE AS written
FOR EACH STATEMENT EXECUTE FUNCTION add_to_monthly_rollups()
"""
# From the hours, which outlive the rows. Forced security binds the owner too, who has to read all of them once.
FILL = (
    "CREATE POLICY owner_copies ON usage_rollups FOR SELECT TO CURRENT_USER USING (true)",
    """
    INSERT INTO monthly_rollups
    SELECT tenant_id, date_trunc('month', hour, 'UTC'), adapter_id, price_version_id, currency, sum(requests),
        sum(uncached_tokens), sum(cached_tokens), sum(completion_tokens), sum(amount_pico)
    FROM usage_rollups GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
    """,
    "DROP POLICY owner_copies ON usage_rollups",
)
SECURE = (
    "ALTER TABLE monthly_rollups ENABLE ROW LEVEL SECURITY",
    "ALTER TABLE monthly_rollups FORCE ROW LEVEL SECURITY",
    f"CREATE POLICY own_rows ON monthly_rollups TO app_tenant USING ({OWN}) WITH CHECK ({OWN})",
    "CREATE POLICY all_rows ON monthly_rollups TO app_operator, app_writer USING (true) WITH CHECK (true)",
    "GRANT SELECT ON monthly_rollups TO app_tenant, app_operator",
    "GRANT SELECT, INSERT, UPDATE ON monthly_rollups TO app_writer",
)


def upgrade() -> None:
    for statement in (ROLLUPS, ADD, TRIGGER, *FILL, *SECURE):
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TRIGGER add_to_monthly_rollups ON usage_records")
    op.execute("DROP FUNCTION add_to_monthly_rollups()")
    op.execute("DROP TABLE monthly_rollups")
