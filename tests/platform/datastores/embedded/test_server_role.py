"""The role that serves: it owns its database and may do nothing with the machine; a cluster served by its superuser is converted."""

from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text

from loraplex.platform.datastores.embedded import postgres
from loraplex.platform.datastores.embedded.postgres import superuser_url
from loraplex.platform.datastores.embedded.server_role import DATABASE, SERVER_ROLE, Connect
from loraplex.platform.datastores.embedded.servers import SERVICES_FOLDER, EmbeddedServices
from loraplex.platform.datastores.migrations import downgrade, upgrade
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database

OWNERS = """
SELECT DISTINCT pg_get_userbyid(owner) FROM (
    SELECT relowner FROM pg_class WHERE relnamespace = 'public'::regnamespace
    UNION ALL SELECT proowner FROM pg_proc WHERE pronamespace = 'public'::regnamespace
    UNION ALL SELECT datdba FROM pg_database WHERE datname = current_database()
    UNION ALL SELECT unnest(polroles) FROM pg_policy WHERE polname LIKE 'owner%'
) AS owned(owner)
"""
FORBIDDEN = (
    "SELECT pg_read_file('PG_VERSION')",
    "SELECT pg_ls_dir('.')",
    "COPY (SELECT 1) TO PROGRAM 'true'",
    "COPY (SELECT 1) TO '/tmp/loraplex-copy'",
    "CREATE ROLE another",
    "CREATE DATABASE another",
    "ALTER SYSTEM SET fsync = off",
    "SET ROLE loraplex",
    "ALTER ROLE loraplex_server SUPERUSER",
)


def created_without_role(connect: Connect, password: str) -> None:
    """As before there was a role that serves."""
    with connect("postgres") as connection:
        if not connection.execute("SELECT FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone():
            connection.execute("CREATE DATABASE loraplex")


def test_the_serving_role_owns_its_database_only(tmp_path: Path) -> None:
    services = EmbeddedServices(tmp_path, transient=True)
    services.start()
    try:
        upgrade(services.database_url)
        with psycopg.connect(services.database_url, autocommit=True) as connection:
            assert connection.execute("SELECT current_user::text").fetchone() == (SERVER_ROLE,)
            assert connection.execute(OWNERS).fetchall() == [(SERVER_ROLE,)]
            for statement in FORBIDDEN:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(statement)
    finally:
        services.stop()


async def test_a_cluster_served_by_its_superuser_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(postgres, "prepare_database", created_without_role)
        async with EmbeddedServices(tmp_path, transient=True) as before:
            old_url = superuser_url(tmp_path / SERVICES_FOLDER, before.database_url)
            upgrade(old_url)
            database = Database(old_url)
            async with database.as_operator() as session:
                tenant = await TenantRepository(session).create("acme")
                issued = await KeyRepository(session).create(tenant.id, "key", ["inference"])
            await database.close()
    for _ in range(2):
        async with EmbeddedServices(tmp_path, transient=True) as services:
            with psycopg.connect(services.database_url) as connection:
                assert connection.execute(OWNERS).fetchall() == [(SERVER_ROLE,)]
            database = Database(services.database_url)
            await database.check_roles()
            async with database.as_writer() as session:
                assert (await KeyRepository(session).authenticate(issued.plaintext)).tenant_name == "acme"
            async with database.as_operator() as session:
                await session.execute(text("UPDATE tenants SET weight = weight + 1"))
            await database.close()
            downgrade(services.database_url, "-1")
            upgrade(services.database_url)
