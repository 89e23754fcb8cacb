"""A key's limits bind the keys that it mints: each key has a parent, and one root whose limits and counters it shares.

Triggers keep the root: of a new key, and of all below a key that gets its first limit, loses its last or is rotated. Where the root of a key that
may have been used changes, a fence outdates the tenant's counters, which are rebuilt with the new sums. Revision 0028, after 0027.
"""

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

COLUMNS = """
ALTER TABLE api_keys
    ADD COLUMN parent_id uuid,
    ADD COLUMN limit_root uuid,
    ADD CONSTRAINT fk_api_keys_parent_id_api_keys FOREIGN KEY (parent_id) REFERENCES api_keys (id) ON DELETE SET NULL,
    ADD CONSTRAINT fk_api_keys_limit_root_api_keys FOREIGN KEY (limit_root) REFERENCES api_keys (id) ON DELETE SET NULL
"""
INDEXES = tuple(
    f"CREATE INDEX ix_api_keys_{column} ON api_keys ({column}) WHERE {column} IS NOT NULL"
    for column in ("parent_id", "limit_root")
)
GRANTS = (
    "GRANT SELECT (parent_id, limit_root) ON api_keys TO app_tenant, app_operator, app_writer",
    "GRANT UPDATE (parent_id) ON api_keys TO app_operator",
)
# The owner runs the triggers' functions; forced security holds it to what they need.
OWNER_POLICIES = {
    "owner_sets_roots": "ON api_keys FOR UPDATE TO CURRENT_USER USING (true)",
    "owner_finds_limits": "ON quotas FOR SELECT TO CURRENT_USER USING (true)",
    "owner_finds_epochs": "ON admission_epochs FOR SELECT TO CURRENT_USER USING (true)",
    "owner_raises_fences": "ON admission_epochs FOR UPDATE TO CURRENT_USER USING (true)",
}
# A rotated key stands below the one that it replaced: both have the same limits and go on sharing their use.
PARENTS = """
UPDATE api_keys k SET parent_id = coalesce(
    (SELECT o.id FROM api_keys o WHERE o.replaced_by = k.id),
    (SELECT p.id FROM api_keys p WHERE p.key_id = k.created_by AND p.tenant_id = k.tenant_id AND p.id <> k.id)
) WHERE k.kind = 'key' AND k.tenant_id IS NOT NULL
"""
LIMITS = (
    "requests_per_minute, tokens_per_minute, concurrent_requests, tokens_per_day, tokens_per_month, budget_per_day, "
    "budget_per_month"
)


def limited(row: str) -> str:
    """Whether a row of `quotas` limits requests."""
    return "num_nonnulls(" + ", ".join(f"{row}.{name}" for name in LIMITS.split(", ")) + ") > 0"


HAS_LIMIT = f"EXISTS (SELECT FROM public.quotas q WHERE q.tenant_id = k.tenant_id AND q.api_key_id = k.id AND {limited('q')})"


def move_roots(first: str) -> str:
    """Set the root of the keys that `first` selects and of all below them. Returns whether keys that are used share counters
    differently from before.
    """
    return f"""
    WITH RECURSIVE tree (id, root) AS (
        SELECT k.id, coalesce(p.limit_root, CASE WHEN {HAS_LIMIT} THEN k.id END)
        FROM public.api_keys k LEFT JOIN public.api_keys p ON p.id = k.parent_id WHERE {first}
        UNION ALL
        SELECT k.id, coalesce(t.root, CASE WHEN {HAS_LIMIT} THEN k.id END)
        FROM public.api_keys k JOIN tree t ON k.parent_id = t.id
    ), moved AS (
        UPDATE public.api_keys k SET limit_root = t.root FROM tree t, public.api_keys b
        WHERE k.id = t.id AND b.id = k.id AND k.limit_root IS DISTINCT FROM t.root
        RETURNING k.tenant_id, coalesce(k.limit_root, k.id) <> k.id OR coalesce(b.limit_root, k.id) <> k.id AS shared
    )
    """


RAISE_FENCE = """
    UPDATE public.admission_epochs SET fence = nextval('public.admission_fence'), fenced_epoch = greatest(fenced_epoch, epoch)
"""
LOCK_FENCES = "pg_advisory_xact_lock(hashtextextended('loraplex admission fences', 0))"
LOCK_KEYS = "PERFORM pg_advisory_xact_lock(hashtextextended('keys:' || NEW.tenant_id, 0))"


def moving(first: str) -> str:
    """The end of a trigger's function: `move_roots`, and a fence if that changes what keys share."""
    return f"""
    {move_roots(first)} SELECT bool_or(m.shared) INTO shared FROM moved m;
    IF shared THEN
        PERFORM {LOCK_FENCES};
        {RAISE_FENCE} WHERE tenant_id = NEW.tenant_id;
    END IF;
    RETURN NULL;
END"""


FUNCTIONS = {
    # The lock on the tenant's keys: no child is made beside this one without a root.
    "move_limit_roots": f"""
DECLARE shared boolean;
BEGIN
    {LOCK_KEYS};
    {moving("k.id = NEW.api_key_id")}""",
    # A gateway of the release before names no parent of the key that it makes, nor who rotated it.
    "move_rotated_root": f"""
DECLARE shared boolean;
BEGIN
    UPDATE public.api_keys SET parent_id = NEW.id WHERE id = NEW.replaced_by AND parent_id IS DISTINCT FROM NEW.id;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    {LOCK_KEYS};
    {moving("k.id = NEW.replaced_by")}""",
    "take_limit_root": f"""
BEGIN
    {LOCK_KEYS};
    -- A gateway of the release before names no parent.
    NEW.parent_id := coalesce(NEW.parent_id, (
        SELECT p.id FROM public.api_keys p WHERE p.key_id = NEW.created_by AND p.tenant_id = NEW.tenant_id
    ));
    NEW.limit_root := (SELECT p.limit_root FROM public.api_keys p WHERE p.id = NEW.parent_id);
    RETURN NEW;
END""",
}
EXECUTE = "FOR EACH ROW WHEN ({}) EXECUTE FUNCTION {}()"
OF_KEY = "api_key_id IS NOT NULL"
BEGINS = f"NEW.{OF_KEY} AND {limited('NEW')}"
MOVES = f"NEW.{OF_KEY} AND ({limited('OLD')}) <> ({limited('NEW')})"
ROTATED = "NEW.tenant_id IS NOT NULL AND NEW.replaced_by IS NOT NULL AND NEW.replaced_by IS DISTINCT FROM OLD.replaced_by"
# Named so that they follow `bump_policy_epoch`, which locks the tenant first wherever limits change.
TRIGGERS = {
    "move_limit_roots": f"AFTER INSERT ON quotas {EXECUTE.format(BEGINS, 'move_limit_roots')}",
    "move_limit_roots_of_changed": f"AFTER UPDATE OF {LIMITS} ON quotas {EXECUTE.format(MOVES, 'move_limit_roots')}",
    "move_rotated_root": f"AFTER UPDATE OF replaced_by ON api_keys {EXECUTE.format(ROTATED, 'move_rotated_root')}",
    "take_limit_root": "BEFORE INSERT ON api_keys "
    + EXECUTE.format(
        "NEW.kind = 'key' AND NEW.tenant_id IS NOT NULL AND num_nonnulls(NEW.parent_id, NEW.created_by) > 0",
        "take_limit_root",
    ),
    # A policy that was read before knows no root of this key.
    "take_limit_root_epoch": "AFTER INSERT ON api_keys "
    + EXECUTE.format("NEW.limit_root IS NOT NULL", "bump_policy_epoch"),
}
TABLES = {name: "quotas" if name.startswith("move_limit") else "api_keys" for name in TRIGGERS}


def upgrade() -> None:
    for statement in (COLUMNS, *INDEXES, *GRANTS):
        op.execute(statement)
    for name, rule in OWNER_POLICIES.items():
        op.execute(f"CREATE POLICY {name} {rule}")
    op.execute(PARENTS)
    op.execute(f"SELECT {LOCK_FENCES}")
    op.execute(
        f"{move_roots('k.parent_id IS NULL')} {RAISE_FENCE} WHERE tenant_id IN (SELECT m.tenant_id FROM moved m WHERE m.shared)"
    )
    for name, body in FUNCTIONS.items():
        op.execute(
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER "
            f"SET search_path = pg_catalog, public AS $${body} $$"
        )
    for name, rule in TRIGGERS.items():
        op.execute(f"CREATE TRIGGER {name} {rule}")


def downgrade() -> None:
    for name, table in TABLES.items():
        op.execute(f"DROP TRIGGER {name} ON {table}")
    for name in FUNCTIONS:
        op.execute(f"DROP FUNCTION {name}()")
    for name, rule in OWNER_POLICIES.items():
        op.execute(f"DROP POLICY {name} ON {rule.split(' ')[1]}")
    op.execute("ALTER TABLE api_keys DROP COLUMN parent_id, DROP COLUMN limit_root")
