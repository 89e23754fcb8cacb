"""A test's database has nothing of the test before it."""

from collections.abc import Callable

import psycopg
import pytest
from tests.conftest import NEWEST_POSTGRES, Servers, execute


@pytest.fixture
def servers(servers_of: Callable[[int], Servers]) -> Servers:
    return servers_of(NEWEST_POSTGRES)


def test_the_next_test_gets_the_same_database_as_if_it_were_new(servers: Servers) -> None:
    url = servers.kept.emptied()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("INSERT INTO gateways (id) VALUES (gen_random_uuid())")
        fence = connection.execute("SELECT nextval('admission_fence')").fetchone()
        assert servers.kept.emptied() == url
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM gateways").fetchone() == (0,)
        assert connection.execute("SELECT nextval('admission_fence')").fetchone() == fence


@pytest.mark.parametrize(
    "statement", ["CREATE TABLE another (id int)", "ALTER TABLE tenants DISABLE ROW LEVEL SECURITY"]
)
def test_another_schema_stays_with_the_test_that_made_it(servers: Servers, statement: str) -> None:
    url = servers.kept.emptied()
    with psycopg.connect(url) as connection:
        connection.execute(statement)
    assert servers.kept.emptied() != url


@pytest.mark.parametrize("setting", ["ALLOW_CONNECTIONS false", "SET default_transaction_read_only = on"])
def test_what_a_test_set_its_database_to_stays_with_it(servers: Servers, setting: str) -> None:
    url = servers.kept.emptied()
    execute(servers.services, f"ALTER DATABASE {{}} {setting}", url.partition("?")[0].rpartition("/")[2])
    with psycopg.connect(servers.kept.emptied()) as connection:
        connection.execute("INSERT INTO gateways (id) VALUES (gen_random_uuid())")
