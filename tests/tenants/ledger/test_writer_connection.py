"""The ledger connection: its role, its failures, and its recovery."""

import psycopg
import pytest

from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.tenants.errors import DatabaseUnavailable, RoleUnsafe
from loraplex.tenants.ledger.writer_connection import WriterConnection

TERMINATE = "SELECT pg_terminate_backend(%s)"


@pytest.mark.parametrize(("durable", "setting"), [(True, "on"), (False, "off")])
async def test_it_writes_as_the_writer(database_url: str, durable: bool, setting: str) -> None:
    connection = WriterConnection(database_url, durable=durable)
    results = await connection.fetch("SELECT current_user::text, current_setting('synchronous_commit')")
    assert results == [("app_writer", setting)]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        await connection.fetch("SELECT secret_sha256 FROM api_keys")
    assert await connection.fetch("SELECT 1") == [(1,)]
    await connection.close()


async def test_a_broken_connection_is_replaced(
    embedded_services: EmbeddedServices, database_url: str
) -> None:
    connection = WriterConnection(database_url, durable=True)
    [(pid,)] = await connection.fetch("SELECT pg_backend_pid()")
    with psycopg.connect(embedded_services.database_url, autocommit=True) as operator:
        operator.execute(TERMINATE, (pid,))
    with pytest.raises(DatabaseUnavailable):
        await connection.fetch("SELECT 1")
    assert await connection.fetch("SELECT 1") == [(1,)]
    await connection.close()


async def test_a_role_above_row_level_security_is_refused(
    embedded_services: EmbeddedServices, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(database_url, autocommit=True) as operator:
        name, bypasses = operator.execute(
            "SELECT current_user, rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = current_user"
        ).fetchone() or ("", False)
    assert bypasses
    monkeypatch.setattr("loraplex.tenants.ledger.writer_connection.ROLE", name)
    with pytest.raises(RoleUnsafe):
        await WriterConnection(database_url, durable=True).fetch("SELECT 1")
