"""Reasoning tokens are a token class with a price of their own, and a request may belong to a session, whose tokens are limited.

`reasoning_tokens` is included in `completion_tokens`; rows from before have none, and versions of cards without a price of reasoning
charge that of a completion. Revision 0030, after 0029.
"""

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

NIL = "'00000000-0000-0000-0000-000000000000'::uuid"
COUNTED = ("usage_records", "usage_rollups", "monthly_rollups")
REASONING = "ALTER TABLE {} ADD COLUMN reasoning_tokens bigint NOT NULL DEFAULT 0"
COLUMNS = (
    *(REASONING.format(table) for table in COUNTED),
    "ALTER TABLE price_versions ADD COLUMN reasoning bigint"
    + " CONSTRAINT ck_price_versions_reasoning CHECK (reasoning BETWEEN 0 AND 10000000000)",
    "ALTER TABLE usage_records ADD COLUMN session text",
    "CREATE INDEX ix_usage_records_tenant_id_session_id ON usage_records (tenant_id, session, id) WHERE session IS NOT NULL",
    "ALTER TABLE quotas ADD COLUMN tokens_per_session bigint"
    + " CONSTRAINT ck_quotas_tokens_per_session CHECK (tokens_per_session >= 0)",
)
METERS = (
    "ALTER TABLE meter_exports DROP CONSTRAINT ck_meter_exports_meter, "
    "ADD CONSTRAINT ck_meter_exports_meter CHECK (meter IN ({}))"
)
BEFORE = "'prompt', 'cached_prompt', 'completion'"


def add_to_months(*reasoning: str) -> str:
    """The function of the trigger that adds each statement's new rows of the ledger to their months: with or without a column."""
    sums = "".join(f", sum(w.{name})" for name in reasoning)
    added = "".join(f", {name} = u.{name} + excluded.{name}" for name in reasoning)
    return f"""
CREATE OR REPLACE FUNCTION add_to_monthly_rollups() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO monthly_rollups AS u (
        tenant_id, month, adapter_id, price_version_id, currency, requests, uncached_tokens, cached_tokens,
        completion_tokens, amount_pico{"".join(f", {name}" for name in reasoning)}
    )
    SELECT w.tenant_id, date_trunc('month', w.admitted_at, 'UTC'), coalesce(w.adapter_id, {NIL}),
        coalesce(w.price_version_id, {NIL}), w.currency, count(*) FILTER (WHERE w.kind = 'usage'),
        sum(w.uncached_tokens), sum(w.cached_tokens), sum(w.completion_tokens), sum(w.amount_pico){sums}
    FROM written w GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
    ON CONFLICT (tenant_id, month, adapter_id, price_version_id, currency) DO UPDATE SET
        requests = u.requests + excluded.requests, uncached_tokens = u.uncached_tokens + excluded.uncached_tokens,
        cached_tokens = u.cached_tokens + excluded.cached_tokens,
        completion_tokens = u.completion_tokens + excluded.completion_tokens,
        amount_pico = u.amount_pico + excluded.amount_pico{added};
    RETURN NULL;
END $$
"""


LIMITS = (
    "requests_per_minute, tokens_per_minute, concurrent_requests, tokens_per_day, tokens_per_month, budget_per_day, "
    "budget_per_month"
)
OF_TENANT = "max_adapters, max_adapter_bytes, max_keys, default_max_tokens"
MORE = "tokens_per_session"


def limited(row: str, limits: str) -> str:
    """Whether a row of `quotas` limits requests, as in revision 0028."""
    return "num_nonnulls(" + ", ".join(f"{row}.{name}" for name in limits.split(", ")) + ") > 0"


def mind_limits(before: str, limits: str) -> tuple[str, ...]:
    """Replace what lists the limits of requests, `before`, by the same with these: two functions and three triggers."""
    execute = (
        "ON quotas FOR EACH ROW WHEN (NEW.api_key_id IS NOT NULL AND {}) EXECUTE FUNCTION move_limit_roots()"
    )
    return (
        f"""
DO $$ DECLARE body text; BEGIN
    FOR body IN SELECT pg_get_functiondef(p.oid) FROM pg_proc p
        WHERE p.pronamespace = 'public'::regnamespace AND p.proname IN ('move_limit_roots', 'move_rotated_root')
    LOOP
        EXECUTE replace(body, '{limited("q", before)}', '{limited("q", limits)}');
    END LOOP;
END $$""",
        "DROP TRIGGER bump_revision ON quotas",
        f"CREATE TRIGGER bump_revision BEFORE UPDATE OF {limits}, {OF_TENANT} ON quotas"
        + " FOR EACH ROW EXECUTE FUNCTION bump_revision()",
        "DROP TRIGGER move_limit_roots ON quotas",
        f"CREATE TRIGGER move_limit_roots AFTER INSERT {execute.format(limited('NEW', limits))}",
        "DROP TRIGGER move_limit_roots_of_changed ON quotas",
        f"CREATE TRIGGER move_limit_roots_of_changed AFTER UPDATE OF {limits} "
        + execute.format(f"({limited('OLD', limits)}) <> ({limited('NEW', limits)})"),
    )


def upgrade() -> None:
    meters = METERS.format(f"{BEFORE}, 'reasoning'")
    for statement in (
        *COLUMNS,
        meters,
        add_to_months("reasoning_tokens"),
        *mind_limits(LIMITS, f"{LIMITS}, {MORE}"),
    ):
        op.execute(statement)


def downgrade() -> None:
    for statement in (*mind_limits(f"{LIMITS}, {MORE}", LIMITS), add_to_months()):
        op.execute(statement)
    # Events of reasoning tokens stay: they were sent.
    op.execute(f"{METERS.format(BEFORE)} NOT VALID")
    op.execute("ALTER TABLE quotas DROP COLUMN tokens_per_session")
    op.execute("DROP INDEX ix_usage_records_tenant_id_session_id")
    op.execute("ALTER TABLE usage_records DROP COLUMN session")
    op.execute("ALTER TABLE price_versions DROP COLUMN reasoning")
    for table in COUNTED:
        op.execute(f"ALTER TABLE {table} DROP COLUMN reasoning_tokens")
