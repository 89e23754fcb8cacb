"""Rate cards with versions that never overlap and never change, and what a tenant's bills say about it.

A version's price is final. Its end is set once a later version begins; the past stays as it was. `price_epochs` has one row,
whose number grows with every change that a price depends on: gateways compare it and read the cards only when it differs.

Revision 0014, after 0013.
"""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

RATE_CARDS = """
CREATE TABLE rate_cards (
    id bigint GENERATED ALWAYS AS IDENTITY,
    scope text NOT NULL,
    tier text,
    tenant_id uuid,
    adapter_name text,
    currency char(3) NOT NULL,
    CONSTRAINT pk_rate_cards PRIMARY KEY (id),
    CONSTRAINT fk_rate_cards_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT uq_rate_cards_tier_tenant_id_adapter_name_currency
        UNIQUE NULLS NOT DISTINCT (tier, tenant_id, adapter_name, currency),
    CONSTRAINT ck_rate_cards_scope CHECK (scope = CASE
        WHEN num_nonnulls(tier, tenant_id, adapter_name) = 0 THEN 'all'
        WHEN tier IS NOT NULL AND num_nonnulls(tenant_id, adapter_name) = 0 THEN 'tier'
        WHEN tier IS NULL AND tenant_id IS NOT NULL AND adapter_name IS NULL THEN 'tenant'
        WHEN tier IS NULL AND tenant_id IS NOT NULL THEN 'adapter'
        ELSE '' END),
    CONSTRAINT ck_rate_cards_tier CHECK (tier ~ '^[a-z0-9][a-z0-9-]{0,62}$'),
    CONSTRAINT ck_rate_cards_adapter_name CHECK (adapter_name ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    CONSTRAINT ck_rate_cards_currency CHECK (currency ~ '^[A-Z]{3}$')
)
"""
RATE_CARDS_OF_TENANT = "CREATE INDEX ix_rate_cards_tenant_id ON rate_cards (tenant_id)"
# A range of one number in place of the number itself: equality in a GiST index would need an extension.
PRICE_VERSIONS = """
CREATE TABLE price_versions (
    id uuid NOT NULL,
    rate_card_id bigint NOT NULL,
    version integer NOT NULL,
    prompt bigint NOT NULL,
    cached_prompt bigint NOT NULL,
    completion bigint NOT NULL,
    effective tstzrange NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_price_versions PRIMARY KEY (id),
    CONSTRAINT fk_price_versions_rate_card_id_rate_cards FOREIGN KEY (rate_card_id) REFERENCES rate_cards (id),
    CONSTRAINT uq_price_versions_rate_card_id_version UNIQUE (rate_card_id, version),
    CONSTRAINT ex_price_versions_effective EXCLUDE USING gist (
        int8range(rate_card_id, rate_card_id, '[]') WITH &&, effective WITH &&
    ),
    CONSTRAINT ck_price_versions_version CHECK (version >= 1),
    CONSTRAINT ck_price_versions_prices CHECK (
        prompt BETWEEN 0 AND 10000000000 AND cached_prompt BETWEEN 0 AND prompt
        AND completion BETWEEN 0 AND 10000000000
    ),
    CONSTRAINT ck_price_versions_effective CHECK (
        NOT isempty(effective) AND lower_inc(effective) AND NOT upper_inc(effective)
    )
)
"""
TENANT_BILLING = """
CREATE TABLE tenant_billing (
    tenant_id uuid NOT NULL,
    currency char(3),
    next_currency char(3),
    next_currency_from date,
    issuer text,
    customer_name text,
    customer_address text,
    vat_id text,
    tax_rate_ppm integer NOT NULL DEFAULT 0,
    minimum_micro bigint NOT NULL DEFAULT 0,
    revision integer NOT NULL DEFAULT 1,
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_tenant_billing PRIMARY KEY (tenant_id),
    CONSTRAINT fk_tenant_billing_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_tenant_billing_currency CHECK (currency ~ '^[A-Z]{3}$' AND next_currency ~ '^[A-Z]{3}$'),
    CONSTRAINT ck_tenant_billing_next_currency CHECK (
        num_nulls(next_currency, next_currency_from) IN (0, 2) AND extract(day FROM next_currency_from) = 1
    ),
    CONSTRAINT ck_tenant_billing_tax_rate_ppm CHECK (tax_rate_ppm BETWEEN 0 AND 1000000),
    CONSTRAINT ck_tenant_billing_minimum_micro CHECK (minimum_micro >= 0)
)
"""
PRICE_EPOCHS = """
CREATE TABLE price_epochs (
    singleton boolean NOT NULL DEFAULT true,
    epoch bigint NOT NULL,
    CONSTRAINT pk_price_epochs PRIMARY KEY (singleton),
    CONSTRAINT ck_price_epochs_singleton CHECK (singleton)
)
"""
REVISED = """
CREATE TRIGGER bump_revision BEFORE UPDATE ON tenant_billing FOR EACH ROW EXECUTE FUNCTION bump_revision()
"""
# Runs as its owner: an operator changes prices, and the number only through them.
BUMP_EPOCH = """
CREATE FUNCTION bump_price_epoch() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, public AS $$
BEGIN
    INSERT INTO public.price_epochs AS e (epoch) VALUES (1) ON CONFLICT (singleton) DO UPDATE SET epoch = e.epoch + 1;
    RETURN NULL;
END $$
"""
# Deferred to the commit: the one row is locked last and briefly, so that no two transactions deadlock.
EPOCH_TRIGGER = """
CREATE CONSTRAINT TRIGGER bump_price_epoch AFTER {changes} DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION bump_price_epoch()
"""
PRICING_CHANGES = (
    "INSERT ON price_versions",
    "INSERT OR UPDATE OF currency, next_currency, next_currency_from ON tenant_billing",
)
# A version may only be ended, in the future, by one that follows it.
KEEP_PRICES = """
CREATE FUNCTION keep_price_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' THEN
        IF to_jsonb(NEW) - 'effective' = to_jsonb(OLD) - 'effective'
            AND lower(NEW.effective) = lower(OLD.effective)
            AND upper(NEW.effective) > clock_timestamp()
            AND upper(NEW.effective) < coalesce(upper(OLD.effective), 'infinity')
        THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE EXCEPTION 'a price version is final' USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
KEEP_PRICES_TRIGGER = """
CREATE TRIGGER keep_price_version BEFORE UPDATE OR DELETE ON price_versions
FOR EACH ROW EXECUTE FUNCTION keep_price_version()
"""
# A tenant sees its own cards, and those of tiers and of all, which past usage of another tier may name.
TENANT = "nullif(current_setting('app.tenant_id', true), '')::uuid"
SEEN_CARDS = f"coalesce(tenant_id, {TENANT}) = {TENANT}"
SEEN_VERSIONS = f"EXISTS (SELECT FROM rate_cards c WHERE c.id = rate_card_id AND coalesce(c.tenant_id, {TENANT}) = {TENANT})"
POLICIES = {
    "rate_cards": SEEN_CARDS,
    "price_versions": SEEN_VERSIONS,
    "tenant_billing": f"tenant_id = {TENANT}",
}
GRANTS = {
    "rate_cards": {"app_tenant": "SELECT", "app_operator": "SELECT, INSERT", "app_writer": "SELECT"},
    "price_versions": {
        "app_tenant": "SELECT",
        "app_operator": "SELECT, INSERT, UPDATE (effective)",
        "app_writer": "SELECT",
    },
    "tenant_billing": {
        "app_tenant": "SELECT",
        "app_operator": "SELECT, INSERT, UPDATE",
        "app_writer": "SELECT",
    },
    "price_epochs": {"app_operator": "SELECT", "app_writer": "SELECT"},
}


def upgrade() -> None:
    tables = (RATE_CARDS, RATE_CARDS_OF_TENANT, PRICE_VERSIONS, TENANT_BILLING, PRICE_EPOCHS)
    bumping = (EPOCH_TRIGGER.format(changes=changes) for changes in PRICING_CHANGES)
    for statement in (*tables, REVISED, BUMP_EPOCH, *bumping, KEEP_PRICES, KEEP_PRICES_TRIGGER):
        op.execute(statement)
    for table, grants in GRANTS.items():
        for role, what in grants.items():
            op.execute(f"GRANT {what} ON {table} TO {role}")
    for table, own in POLICIES.items():
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY own_rows ON {table} FOR SELECT TO app_tenant USING ({own})")
        op.execute(
            f"CREATE POLICY all_rows ON {table} TO app_operator, app_writer USING (true) WITH CHECK (true)"
        )


def downgrade() -> None:
    for table in ("price_versions", "rate_cards", "tenant_billing", "price_epochs"):
        op.execute(f"DROP TABLE {table}")
    for function in ("keep_price_version", "bump_price_epoch"):
        op.execute(f"DROP FUNCTION {function}()")
