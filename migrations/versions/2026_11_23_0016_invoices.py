"""Credits as transactions that sum to zero, invoices that never change once they are final, and numbers without gaps.

Revision 0016, after 0015.
"""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

OWN = "tenant_id = nullif(current_setting('app.tenant_id', true), '')::uuid"
MONTH = r"^20\d{2}-(0[1-9]|1[0-2])$"
GRANTS_TABLE = """
CREATE TABLE credit_grants (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    currency char(3) NOT NULL,
    amount_micro bigint NOT NULL,
    priority integer NOT NULL,
    expires_at timestamptz,
    reason text NOT NULL,
    granted_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_credit_grants PRIMARY KEY (id),
    CONSTRAINT uq_credit_grants_tenant_id_id UNIQUE (tenant_id, id),
    CONSTRAINT fk_credit_grants_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_credit_grants_amount_micro CHECK (amount_micro BETWEEN 1 AND 1000000000000000),
    CONSTRAINT ck_credit_grants_priority CHECK (priority BETWEEN 0 AND 100),
    CONSTRAINT ck_credit_grants_expires_at CHECK (expires_at > granted_at)
)
"""
INVOICES = f"""
CREATE TABLE invoices (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    month text NOT NULL,
    currency char(3) NOT NULL,
    attempt integer NOT NULL,
    state text NOT NULL,
    grace_ends_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    number bigint,
    finalized_at timestamptz,
    issuer text,
    customer_name text,
    customer_address text,
    vat_id text,
    tax_rate_ppm integer,
    minimum_micro bigint,
    credit_balances jsonb,
    subtotal_micro bigint,
    credits_micro bigint,
    tax_micro bigint,
    rounding_micro bigint,
    total_micro bigint,
    paid_at timestamptz,
    paid_reference text,
    voided_at timestamptz,
    CONSTRAINT pk_invoices PRIMARY KEY (id),
    CONSTRAINT uq_invoices_tenant_id_id UNIQUE (tenant_id, id),
    CONSTRAINT uq_invoices_tenant_id_month_currency_attempt UNIQUE (tenant_id, month, currency, attempt),
    CONSTRAINT uq_invoices_issuer_number UNIQUE (issuer, number),
    CONSTRAINT fk_invoices_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_invoices_month CHECK (month ~ '{MONTH}'),
    CONSTRAINT ck_invoices_state CHECK (state IN ('draft', 'final', 'paid', 'void')),
    CONSTRAINT ck_invoices_attempt CHECK (attempt >= 0),
    CONSTRAINT ck_invoices_final CHECK (
        num_nonnulls(number, finalized_at, issuer, customer_name, customer_address, tax_rate_ppm, minimum_micro,
            credit_balances, subtotal_micro, credits_micro, tax_micro, rounding_micro, total_micro)
        = CASE state WHEN 'draft' THEN 0 ELSE 13 END
    ),
    CONSTRAINT ck_invoices_paid CHECK (
        num_nonnulls(paid_at, paid_reference) = CASE state WHEN 'paid' THEN 2 ELSE 0 END
    ),
    CONSTRAINT ck_invoices_void CHECK ((voided_at IS NOT NULL) = (state = 'void')),
    CONSTRAINT ck_invoices_total_micro CHECK (
        credits_micro >= 0 AND total_micro = subtotal_micro - credits_micro + tax_micro + rounding_micro
    )
)
"""
LINES = f"""
CREATE TABLE invoice_lines (
    invoice_id uuid NOT NULL,
    position integer NOT NULL,
    tenant_id uuid NOT NULL,
    kind text NOT NULL,
    month text NOT NULL,
    adapter_id uuid,
    adapter text,
    token_class text,
    price_version_id uuid,
    price bigint,
    tokens bigint NOT NULL,
    amount_pico numeric(38,0) NOT NULL,
    amount_micro bigint NOT NULL,
    billed_tokens bigint NOT NULL,
    billed_pico numeric(38,0) NOT NULL,
    CONSTRAINT pk_invoice_lines PRIMARY KEY (invoice_id, position),
    CONSTRAINT fk_invoice_lines_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_invoice_lines_tenant_id_invoice_id_invoices FOREIGN KEY (tenant_id, invoice_id)
        REFERENCES invoices (tenant_id, id),
    CONSTRAINT fk_invoice_lines_price_version_id_price_versions FOREIGN KEY (price_version_id)
        REFERENCES price_versions (id),
    CONSTRAINT ck_invoice_lines_kind CHECK (kind IN ('usage', 'adjustment', 'minimum')),
    CONSTRAINT ck_invoice_lines_month CHECK (month ~ '{MONTH}'),
    CONSTRAINT ck_invoice_lines_amount_pico CHECK (price IS NULL OR amount_pico = tokens::numeric * price),
    CONSTRAINT ck_invoice_lines_amount_micro CHECK (abs(amount_micro::numeric * 1000000 - amount_pico) <= 500000)
)
"""
ENTRIES = """
CREATE TABLE credit_entries (
    id bigint GENERATED ALWAYS AS IDENTITY,
    tenant_id uuid NOT NULL,
    transaction_id uuid NOT NULL,
    grant_id uuid NOT NULL,
    invoice_id uuid,
    account text NOT NULL,
    amount_micro bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_credit_entries PRIMARY KEY (id),
    CONSTRAINT fk_credit_entries_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_credit_entries_tenant_id_grant_id_credit_grants FOREIGN KEY (tenant_id, grant_id)
        REFERENCES credit_grants (tenant_id, id),
    CONSTRAINT fk_credit_entries_tenant_id_invoice_id_invoices FOREIGN KEY (tenant_id, invoice_id)
        REFERENCES invoices (tenant_id, id),
    CONSTRAINT ck_credit_entries_account CHECK (account IN ('issued', 'available', 'consumed')),
    CONSTRAINT ck_credit_entries_amount_micro CHECK (amount_micro <> 0)
)
"""
NUMBERS = """
CREATE TABLE invoice_numbers (
    issuer text NOT NULL,
    last_number bigint NOT NULL,
    CONSTRAINT pk_invoice_numbers PRIMARY KEY (issuer)
)
"""
INDEXES = (
    "CREATE UNIQUE INDEX uq_invoices_living ON invoices (tenant_id, month, currency) WHERE state <> 'void'",
    "CREATE INDEX ix_invoices_drafts ON invoices (grace_ends_at) WHERE state = 'draft'",
    "CREATE INDEX ix_invoices_created_at_id ON invoices (created_at, id)",
    "CREATE INDEX ix_invoice_lines_tenant_id ON invoice_lines (tenant_id)",
    "CREATE INDEX ix_credit_entries_tenant_id_grant_id ON credit_entries (tenant_id, grant_id)",
    "CREATE INDEX ix_credit_entries_transaction_id ON credit_entries (transaction_id)",
)
KEEP_INVOICE = """
CREATE FUNCTION keep_invoice() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE later text[] := ARRAY['state', 'paid_at', 'paid_reference', 'voided_at'];
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.state = 'draft' AND NEW.state IN ('draft', 'final')
        AND (NEW.id, NEW.tenant_id, NEW.month, NEW.currency, NEW.attempt, NEW.grace_ends_at, NEW.created_at)
            = (OLD.id, OLD.tenant_id, OLD.month, OLD.currency, OLD.attempt, OLD.grace_ends_at, OLD.created_at) THEN
        RETURN NEW;
    END IF;
    IF TG_OP = 'UPDATE' AND OLD.state = 'final' AND NEW.state IN ('paid', 'void')
        AND to_jsonb(NEW) - later = to_jsonb(OLD) - later THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'a final invoice is never changed' USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
# Lines are written before the invoice of their transaction becomes final.
KEEP_LINE = """
CREATE FUNCTION keep_invoice_line() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' AND EXISTS (SELECT FROM invoices WHERE id = NEW.invoice_id AND state = 'draft') THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'the lines of an invoice are never changed' USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
KEEP_CREDIT = """
CREATE FUNCTION keep_credit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'credits are never changed' USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
BALANCE = """
CREATE FUNCTION balance_credit_transaction() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT sum(amount_micro) FROM credit_entries WHERE transaction_id = NEW.transaction_id) <> 0 THEN
        RAISE EXCEPTION 'the entries of a transaction sum to zero' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    IF (SELECT sum(amount_micro) FROM credit_entries WHERE tenant_id = NEW.tenant_id AND grant_id = NEW.grant_id
        AND account = 'available') < 0 THEN
        RAISE EXCEPTION 'a credit is never negative' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NULL;
END $$
"""
FUNCTIONS = {
    "keep_invoice": KEEP_INVOICE,
    "keep_invoice_line": KEEP_LINE,
    "keep_credit": KEEP_CREDIT,
    "balance_credit_transaction": BALANCE,
}
TRIGGERS = {
    "TRIGGER keep_invoice BEFORE UPDATE OR DELETE ON invoices": "",
    "TRIGGER keep_invoice_line BEFORE INSERT OR UPDATE OR DELETE ON invoice_lines": "",
    "TRIGGER keep_credit BEFORE UPDATE OR DELETE ON credit_grants": "",
    "TRIGGER keep_credit BEFORE UPDATE OR DELETE ON credit_entries": "",
    "CONSTRAINT TRIGGER balance_credit_transaction AFTER INSERT ON credit_entries": "DEFERRABLE INITIALLY DEFERRED",
}
READ = {"app_tenant": "SELECT"}
GRANTS = {
    "credit_grants": READ | {"app_operator": "SELECT, INSERT"},
    "credit_entries": READ | {"app_operator": "SELECT, INSERT"},
    "invoices": READ | {"app_operator": "SELECT, INSERT, UPDATE"},
    "invoice_lines": READ | {"app_operator": "SELECT, INSERT"},
}


def upgrade() -> None:
    for statement in (GRANTS_TABLE, INVOICES, LINES, ENTRIES, NUMBERS, *INDEXES, *FUNCTIONS.values()):
        op.execute(statement)
    for trigger, when in TRIGGERS.items():
        function = trigger.partition("TRIGGER ")[2].partition(" ")[0]
        op.execute(f"CREATE {trigger} {when} FOR EACH ROW EXECUTE FUNCTION {function}()")
    for table, grants in GRANTS.items():
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY own_rows ON {table} TO app_tenant USING ({OWN}) WITH CHECK ({OWN})")
        op.execute(f"CREATE POLICY all_rows ON {table} TO app_operator USING (true) WITH CHECK (true)")
        for role, what in grants.items():
            op.execute(f"GRANT {what} ON {table} TO {role}")
    op.execute("GRANT SELECT, INSERT, UPDATE ON invoice_numbers TO app_operator")


def downgrade() -> None:
    for table in ("invoice_numbers", "credit_entries", "invoice_lines", "invoices", "credit_grants"):
        op.execute(f"DROP TABLE {table}")
    for function in FUNCTIONS:
        op.execute(f"DROP FUNCTION {function}()")
