"""Row-level security separates tenants in the database itself, whatever a statement requests."""

from functools import partial
from itertools import pairwise
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError
from tests.tenants.registry_records import AliasWriter, RegistryWriter, add, make_tenant

from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import ROLES, Database
from loraplex.tenants.errors import RoleUnsafe
from loraplex.tenants.models import Base

pytestmark = pytest.mark.parametrize("postgres_major", POSTGRES_MAJORS, indirect=True)
UNGUARDED = """
    SELECT c.relname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p', 'm', 'v') AND a.attname = 'tenant_id'
    AND NOT c.relispartition AND NOT (c.relrowsecurity AND c.relforcerowsecurity AND EXISTS (
        SELECT FROM pg_policy p WHERE p.polrelid = c.oid AND pg_get_expr(p.polqual, c.oid) LIKE '%app.tenant_id%'
        AND p.polroles = ARRAY['app_tenant'::regrole::oid]
    ))
"""
OPEN_TO_ALL = """
    SELECT p.polname FROM pg_policy p JOIN pg_class c ON c.oid = p.polrelid
    WHERE 0 = ANY (p.polroles) OR 'app_tenant'::regrole = ANY (p.polroles) AND p.polpermissive
    AND coalesce(pg_get_expr(p.polqual, c.oid), pg_get_expr(p.polwithcheck, c.oid)) NOT LIKE '%app.tenant_id%'
"""
# A statement on a partition itself passes by the policies of its table: only rights to none keep every role away.
REACHABLE_PARTITIONS = """
    SELECT c.relname FROM pg_class c
    WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND c.relispartition
    AND NOT (c.relrowsecurity AND c.relforcerowsecurity AND NOT EXISTS (
        SELECT FROM pg_roles r WHERE r.rolname LIKE 'app\\_%' AND NOT r.rolsuper
        AND has_table_privilege(r.rolname, c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE')
    ) AND NOT EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid))
"""
PUBLIC_RIGHTS = """
    SELECT table_name FROM information_schema.role_table_grants WHERE grantee = 'PUBLIC' AND table_schema = 'public'
"""


def test_every_table_of_tenants_is_forced(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        assert connection.execute(UNGUARDED).fetchall() == []
        assert connection.execute(OPEN_TO_ALL).fetchall() == []
        assert connection.execute(PUBLIC_RIGHTS).fetchall() == []
        assert connection.execute(REACHABLE_PARTITIONS).fetchall() == []


@pytest.mark.parametrize("table", ["usage_records", "request_phases"])
def test_no_role_changes_what_is_written_once(database_url: str, table: str) -> None:
    rights = "SELECT has_table_privilege(%s, %s, 'UPDATE, DELETE, TRUNCATE, TRIGGER')"
    with psycopg.connect(database_url) as connection:
        for role in ROLES:
            assert connection.execute(rights, (role, table)).fetchone() == (False,), role


def test_the_query_finds_a_table_that_is_not(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE leak (tenant_id uuid)")
        assert connection.execute(UNGUARDED).fetchall() == [("leak",)]
        connection.execute("GRANT SELECT ON usage_records_default TO app_tenant")
        connection.execute("ALTER TABLE request_phases_default NO FORCE ROW LEVEL SECURITY")
        found = connection.execute(REACHABLE_PARTITIONS).fetchall()
        assert sorted(found) == [("request_phases_default",), ("usage_records_default",)]


WITHOUT_RIGHTS = {
    *("gateways", "admission_epochs", "price_epochs", "invoice_numbers", "installation"),
    *("one_time_links", "recovery_codes", "sign_in_throttles", "sign_up_plans", "engine_minutes"),
}
WITH_SECRETS = {"api_keys", "users", "sessions", "invitations"}


async def two_tenants(database: Database) -> tuple[UUID, UUID]:
    mine, other = await make_tenant(database, "acme"), await make_tenant(database, "rival")
    for tenant_id in (mine, other):
        async with database.as_tenant(tenant_id) as session:
            await add(RegistryWriter(session, tenant_id), 1)
            await KeyRepository(session).create(tenant_id, "first", ["inference"])
    return mine, other


async def test_a_tenant_sees_and_changes_its_own_rows_alone(database: Database) -> None:
    mine, other = await two_tenants(database)
    async with database.as_tenant(mine) as session:
        for table in ("adapters", "adapter_versions", "api_keys"):
            seen = await session.scalars(text(f"SELECT DISTINCT tenant_id FROM {table}"))
            assert seen.all() == [mine], table
        assert (await session.scalars(text("SELECT id FROM tenants"))).all() == [mine]
        changed = await session.execute(text("UPDATE adapters SET description = 'x' RETURNING tenant_id"))
        assert changed.scalars().all() == [mine]
        # A row with another tenant's id is refused even if the statement bypasses the repository.
        with pytest.raises(ProgrammingError, match="row-level security"):
            await RegistryWriter(session, other).get_or_create("stolen")


async def test_without_a_tenant_there_are_no_rows(database: Database) -> None:
    await two_tenants(database)
    async with database._transaction("app_tenant", "") as session:
        for table in Base.metadata.tables:
            if table not in WITHOUT_RIGHTS:
                columns = "id" if table in WITH_SECRETS else "*"
                found = await session.execute(text(f"SELECT {columns} FROM {table}"))
                assert found.all() == [], table


async def test_a_role_ends_with_its_transaction(database: Database) -> None:
    mine, _ = await two_tenants(database)
    single = Database(database.url, pool_size=1)
    async with single.as_tenant(mine) as session:
        assert await session.scalar(text("SELECT current_user::text")) == "app_tenant"
    async with single.as_writer() as session:
        assert await session.scalar(text("SELECT current_user::text")) == "app_writer"
        assert await session.scalar(text("SELECT current_setting('app.tenant_id', true)")) == ""
    await single.close()


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT secret_sha256 FROM api_keys",
        "SELECT * FROM find_api_key('x')",
        "UPDATE tenants SET weight = 1000",
        "UPDATE api_keys SET secret_sha256 = ''",
        "DELETE FROM usage_records",
        "UPDATE usage_records SET amount_pico = 0",
        "SELECT * FROM usage_records_default",
        "SELECT * FROM request_phases_default",
        "INSERT INTO usage_rollups SELECT FROM usage_rollups",
        "UPDATE monthly_rollups SET amount_pico = 0",
        "SELECT drop_usage_partition('usage_records', 24)",
        "SELECT add_usage_partition('usage_records', now())",
        "INSERT INTO usage_totals SELECT FROM usage_totals",
        "UPDATE audit_entries SET action = ''",
        "DELETE FROM audit_entries",
        "SELECT * FROM gateways",
        "SELECT * FROM price_epochs",
        "INSERT INTO rate_cards SELECT FROM rate_cards",
        "UPDATE price_versions SET effective = 'empty'",
        "UPDATE tenant_billing SET tax_rate_ppm = 0",
        "UPDATE alias_targets SET weight = 1",
        "UPDATE outbox_events SET data = '{}'",
        "UPDATE webhook_deliveries SET event_id = endpoint_id",
        "UPDATE meter_exports SET value = 1",
        "SELECT password_hash FROM users",
        "SELECT totp_secret FROM users",
        "UPDATE users SET is_operator = true",
        "INSERT INTO users (id) VALUES (gen_random_uuid())",
        "UPDATE memberships SET user_id = tenant_id",
        "SELECT token_sha256 FROM invitations",
        "UPDATE invitations SET role = 'admin'",
        "SELECT token_sha256 FROM sessions",
        "INSERT INTO sessions (id) VALUES (gen_random_uuid())",
        "UPDATE sessions SET expires_at = 'infinity'",
        "SELECT * FROM one_time_links",
        "SELECT * FROM sign_in_throttles",
        "SELECT * FROM sign_up_plans",
        "CREATE TABLE mine (x int)",
    ],
)
async def test_a_tenants_transaction_is_confined(database: Database, statement: str) -> None:
    mine, _ = await two_tenants(database)
    limited = Database(await login_of(database), pool_size=1)
    try:
        with pytest.raises(ProgrammingError, match="permission denied"):
            async with limited.as_tenant(mine) as session:
                await session.execute(text(statement))
    finally:
        await limited.close()


async def test_a_tenant_narrows_but_never_sets_its_own_limits(database: Database) -> None:
    mine, _ = await two_tenants(database)
    own = "INSERT INTO quotas (id, tenant_id, tokens_per_day) VALUES (gen_random_uuid(), :tenant, 5)"
    for_key = (
        "INSERT INTO quotas (id, tenant_id, api_key_id, tokens_per_day)"
        " SELECT gen_random_uuid(), :tenant, id, 5 FROM api_keys"
    )
    async with database.as_operator() as session:
        await session.execute(text(own), {"tenant": mine})
    async with database.as_tenant(mine) as session:
        await session.execute(text(for_key), {"tenant": mine})
        changed = await session.execute(text("UPDATE quotas SET tokens_per_day = 7 RETURNING api_key_id"))
        assert None not in changed.scalars().all()
    with pytest.raises(ProgrammingError, match="row-level security"):
        async with database.as_tenant(mine) as session:
            await session.execute(text("DELETE FROM quotas"))
            await session.execute(text(own), {"tenant": mine})


async def epoch_of(database: Database, tenant_id: UUID) -> int:
    async with database.as_operator() as session:
        query = text("SELECT policy_epoch FROM tenants WHERE id = :id")
        return int(await session.scalar(query, {"id": tenant_id}) or 0)


async def test_changes_that_affect_requests_advance_the_policy_epoch(database: Database) -> None:
    mine, _ = await two_tenants(database)
    epoch = partial(epoch_of, database, mine)
    before = await epoch()
    async with database.as_tenant(mine) as session:
        await AliasWriter(session, mine).set("support", "production", {1: 100})
        await add(RegistryWriter(session, mine), 2)
        await session.execute(text("UPDATE adapter_versions SET report = '{}'"))
    seen = [await epoch()]
    assert seen == [before], "what only lets a name begin to resolve changes no policy"
    for statement in (
        "UPDATE api_keys SET revoked_at = now()",
        "UPDATE api_keys SET allowed_cidrs = '{10.0.0.0/8}'",
        "INSERT INTO quotas (id, tenant_id, api_key_id) SELECT gen_random_uuid(), tenant_id, id FROM api_keys",
        "UPDATE quotas SET tokens_per_day = 1",
        "DELETE FROM quotas",
        "UPDATE adapter_versions SET state = 'quarantined'",
        "UPDATE adapter_versions SET state = 'ready'",
        "UPDATE adapter_versions SET tool_style = 'hermes' WHERE version = 2",
        "UPDATE adapter_versions SET reasoning_style = '{}' WHERE version = 2",
        "UPDATE adapter_aliases SET generation = generation + 1",
        "DELETE FROM adapter_aliases",
        "UPDATE adapters SET deleted_at = now()",
    ):
        async with database.as_tenant(mine) as session:
            await session.execute(text(statement))
        seen.append(await epoch())
    async with database.as_operator() as session:
        await session.execute(text("UPDATE tenants SET suspended_at = now() WHERE id = :id"), {"id": mine})
    seen.append(await epoch())
    async with database.as_operator() as session:
        await session.execute(text("UPDATE api_keys SET revoked_at = NULL"))
    seen.append(await epoch())
    async with database.as_operator() as session:
        await session.execute(text("DELETE FROM api_keys WHERE tenant_id = :id"), {"id": mine})
    seen.append(await epoch())
    assert all(after > before for before, after in pairwise(seen)), seen


async def test_a_version_that_no_name_refers_to_changes_no_policy(database: Database) -> None:
    mine, _ = await two_tenants(database)
    async with database.as_tenant(mine) as session:
        await session.execute(text("UPDATE adapter_versions SET state = 'deprecated'"))
    before = await epoch_of(database, mine)
    for change in (
        "tool_style = 'hermes'",
        "reasoning_style = '{}'",
        "state = 'quarantined'",
        "state = 'rejected'",
        "state = 'deleting'",
    ):
        async with database.as_tenant(mine) as session:
            await session.execute(text(f"UPDATE adapter_versions SET {change}"))
        assert await epoch_of(database, mine) == before, change


async def login_of(database: Database) -> str:
    """The address of a user without rights of its own, who may take the three roles."""
    async with database.as_operator() as session:
        await session.execute(text("RESET ROLE"))
        exists = await session.scalar(text("SELECT count(*) FROM pg_roles WHERE rolname = 'app_login'"))
        if not exists:
            await session.execute(text("CREATE ROLE app_login LOGIN NOINHERIT PASSWORD 'app_login'"))
            await session.execute(text(f"GRANT {', '.join(ROLES)} TO app_login"))
    return database.url.replace(database.url.split("//")[1].split("@")[0], "app_login:app_login")


async def test_roles_that_bind_are_accepted(database: Database) -> None:
    await database.check_roles()
    limited = Database(await login_of(database), pool_size=1)
    await limited.check_roles()
    await limited.close()


async def test_a_role_that_bypasses_is_refused(database: Database) -> None:
    async with database.as_operator() as session:
        await session.execute(text("RESET ROLE"))
        await session.execute(text("ALTER ROLE app_writer BYPASSRLS"))
    try:
        with pytest.raises(RoleUnsafe, match="app_writer bypasses"):
            await database.check_roles()
    finally:
        async with database.as_operator() as session:
            await session.execute(text("RESET ROLE"))
            await session.execute(text("ALTER ROLE app_writer NOBYPASSRLS"))


async def test_a_user_without_the_roles_is_refused(database: Database) -> None:
    async with database.as_operator() as session:
        await session.execute(text("RESET ROLE"))
        await session.execute(text("DROP ROLE IF EXISTS app_stranger"))
        await session.execute(text("CREATE ROLE app_stranger LOGIN PASSWORD 'app_stranger'"))
    url = database.url.replace(database.url.split("//")[1].split("@")[0], "app_stranger:app_stranger")
    foreign = Database(url, pool_size=1)
    with pytest.raises(RoleUnsafe, match="may not take the role app_tenant"):
        await foreign.check_roles()
    await foreign.close()
