"""Guards of split aliases, what the ledger must know of a request for them, and the event that an alias has gone back.

`alias` is null for rows from before, of pinned versions and of the base model. Revision 0032, after 0031.
"""

from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

COLUMNS = (
    "ALTER TABLE usage_records ADD COLUMN alias text",
    "ALTER TABLE usage_records ADD COLUMN unsatisfied boolean NOT NULL DEFAULT false",
    "CREATE INDEX ix_usage_records_alias_settled_at ON usage_records (tenant_id, adapter_id, alias, settled_at)"
    + " WHERE alias IS NOT NULL",
)
GUARDS = """
CREATE TABLE alias_guards (
    adapter_id uuid NOT NULL,
    alias text NOT NULL,
    tenant_id uuid NOT NULL,
    generation integer NOT NULL,
    baseline integer NOT NULL,
    canary integer NOT NULL,
    canary_weight integer NOT NULL,
    max_failure_ratio double precision,
    max_unsatisfied double precision,
    max_ttft_ratio double precision,
    min_requests integer NOT NULL,
    began_at timestamptz NOT NULL DEFAULT now(),
    counted_until timestamptz NOT NULL DEFAULT now(),
    counts jsonb NOT NULL DEFAULT '{}',
    CONSTRAINT pk_alias_guards PRIMARY KEY (adapter_id, alias),
    CONSTRAINT fk_alias_guards_adapter_id_alias_adapter_aliases FOREIGN KEY (adapter_id, alias)
        REFERENCES adapter_aliases (adapter_id, alias) ON DELETE CASCADE,
    CONSTRAINT fk_alias_guards_tenant_id_adapter_id_adapters FOREIGN KEY (tenant_id, adapter_id)
        REFERENCES adapters (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_alias_guards_versions CHECK (baseline <> canary),
    CONSTRAINT ck_alias_guards_bounds CHECK (num_nonnulls(max_failure_ratio, max_unsatisfied, max_ttft_ratio) >= 1)
)
"""
OWN = "tenant_id = nullif(current_setting('app.tenant_id', true), '')::uuid"
SECURITY = (
    "ALTER TABLE alias_guards ENABLE ROW LEVEL SECURITY",
    "ALTER TABLE alias_guards FORCE ROW LEVEL SECURITY",
    f"CREATE POLICY own_rows ON alias_guards TO app_tenant USING ({OWN}) WITH CHECK ({OWN})",
    "CREATE POLICY all_rows ON alias_guards TO app_operator, app_writer USING (true) WITH CHECK (true)",
    "GRANT SELECT, INSERT, UPDATE ON alias_guards TO app_tenant",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON alias_guards TO app_operator",
)
BEFORE = "'quota.threshold', 'adapter.ready', 'adapter.rejected', 'adapter.quarantined', 'invoice.finalized'"
EVENTS = (
    "ALTER TABLE webhook_endpoints DROP CONSTRAINT ck_webhook_endpoints_events, ADD CONSTRAINT ck_webhook_endpoints_events"
    + " CHECK (cardinality(events) >= 1 AND events <@ ARRAY[{types}])",
    "ALTER TABLE outbox_events DROP CONSTRAINT ck_outbox_events_type, ADD CONSTRAINT ck_outbox_events_type"
    + " CHECK (type IN ({types}))",
)


def upgrade() -> None:
    for statement in (
        *COLUMNS,
        GUARDS,
        "CREATE INDEX ix_alias_guards_tenant_id ON alias_guards (tenant_id)",
        *SECURITY,
    ):
        op.execute(statement)
    for statement in EVENTS:
        op.execute(statement.format(types=f"{BEFORE}, 'alias.reverted'"))


def downgrade() -> None:
    op.execute("DELETE FROM outbox_events WHERE type = 'alias.reverted'")
    op.execute("DELETE FROM webhook_endpoints WHERE events = ARRAY['alias.reverted']")
    op.execute("UPDATE webhook_endpoints SET events = array_remove(events, 'alias.reverted')")
    for statement in EVENTS:
        op.execute(statement.format(types=BEFORE))
    op.execute("DROP TABLE alias_guards")
    op.execute("DROP INDEX ix_usage_records_alias_settled_at")
    op.execute("ALTER TABLE usage_records DROP COLUMN unsatisfied")
    op.execute("ALTER TABLE usage_records DROP COLUMN alias")
