"""A real PostgreSQL and a real Valkey for every test that asks: one pair of servers per run, an empty migrated database and
an empty Valkey per test.
"""

from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import boto3
import psycopg
import pytest
import redis
from moto.server import ThreadedMotoServer
from psycopg import sql

from loraplex.adapters.objects import S3Options
from loraplex.platform.embedded import EmbeddedServices
from loraplex.platform.schema import upgrade
from loraplex.tenants.database import Database

TEMPLATE = "template_migrated"
DISCONNECT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
# Triggers and foreign keys keep rows that only an owner who means all of them may delete.
EMPTY = """
DO $$ DECLARE name text; BEGIN
    SET LOCAL session_replication_role = replica;
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'alembic_version' LOOP
        EXECUTE format('DELETE FROM %I', name);
    END LOOP;
END $$
"""
# One line for each column, trigger, policy, table and function, and the revision.
SCHEMA = """
SELECT md5(string_agg(line, ',' ORDER BY line)) FROM (
    SELECT concat_ws(' ', attrelid::regclass, attname, atttypid, attnotnull) AS line
    FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
    WHERE relnamespace = 'public'::regnamespace AND attnum > 0
    UNION ALL SELECT concat_ws(' ', tgrelid::regclass, tgname, tgenabled) FROM pg_trigger WHERE NOT tgisinternal
    UNION ALL SELECT concat_ws(' ', tablename, policyname, roles, qual, with_check) FROM pg_policies
    UNION ALL SELECT concat_ws(' ', relname, relrowsecurity, relforcerowsecurity, relacl) FROM pg_class
        WHERE relnamespace = 'public'::regnamespace
    UNION ALL SELECT concat_ws(' ', proname, prosrc, proacl) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
    UNION ALL SELECT version_num FROM alembic_version
) AS schema
"""
S3_REGION, S3_KEY, S3_SECRET = "us-east-1", "test-key", "test-secret"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large-uploads", action="store_true", help="upload 300 MB, where it is 48 otherwise")
    parser.addoption("--long", action="store_true", help="run what is marked as long, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is long and hardly ever breaks alone waits for `--long`: the suite has twenty minutes on two cores."""
    if config.getoption("--long"):
        return
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip(reason="runs with --long"))


def url_of(services: EmbeddedServices, database: str) -> str:
    address, _, query = services.database_url.partition("?")
    return f"{address.rpartition('/')[0]}/{database}?{query}"


def execute(services: EmbeddedServices, statement: str, *names: str) -> None:
    with psycopg.connect(services.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


class KeptDatabase:
    """One database for test after test: emptied in a few milliseconds, where a new one takes some hundred. A test that
    left another schema or keeps others out gets the next test a new one.
    """

    def __init__(self, services: EmbeddedServices, template: str) -> None:
        self._services = services
        self._template = template
        with psycopg.connect(url_of(services, template)) as connection:
            self._schema = connection.execute(SCHEMA).fetchone()
        self._name: str | None = None

    def emptied(self) -> str:
        """Its address. Whoever is still connected to it is not any more."""
        if self._name is None or not self._empty(self._name):
            self._name = f"test_{uuid4().hex}"
            execute(self._services, "CREATE DATABASE {} TEMPLATE {}", self._name, self._template)
        return url_of(self._services, self._name)

    def _empty(self, name: str) -> bool:
        with psycopg.connect(self._services.database_url, autocommit=True) as connection:
            connection.execute(DISCONNECT, [name])
        try:
            with psycopg.connect(url_of(self._services, name)) as connection:
                connection.execute(EMPTY)
                return connection.execute(SCHEMA).fetchone() == self._schema
        except psycopg.OperationalError:
            return False


@pytest.fixture(scope="session")
def embedded_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServices]:
    """The servers of this test run; `database_url` is a bare database."""
    services = EmbeddedServices(tmp_path_factory.mktemp("services"))
    services.start()
    # Nothing of these servers has to outlive a crash.
    execute(services, "ALTER SYSTEM SET fsync = off")
    execute(services, "SELECT pg_reload_conf()")
    yield services
    services.stop()


@pytest.fixture(scope="session")
def database_template(embedded_services: EmbeddedServices) -> str:
    """The name of a database at the newest schema, copied for each test."""
    execute(embedded_services, "CREATE DATABASE {}", TEMPLATE)
    upgrade(url_of(embedded_services, TEMPLATE))
    return TEMPLATE


@pytest.fixture
def empty_database_url(embedded_services: EmbeddedServices) -> Iterator[str]:
    """The address of a fresh database without any table."""
    name = f"test_{uuid4().hex}"
    execute(embedded_services, "CREATE DATABASE {}", name)
    yield url_of(embedded_services, name)
    execute(embedded_services, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture(scope="session")
def kept_database(embedded_services: EmbeddedServices, database_template: str) -> KeptDatabase:
    return KeptDatabase(embedded_services, database_template)


@pytest.fixture
def database_url(kept_database: KeptDatabase) -> str:
    """The address of a database at the newest schema without any row."""
    return kept_database.emptied()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A fresh database at the newest schema."""
    database = Database(database_url)
    yield database
    await database.close()


@pytest.fixture
def valkey_url(embedded_services: EmbeddedServices) -> str:
    """The address of an empty Valkey."""
    with redis.Redis.from_url(embedded_services.redis_url) as client:
        client.flushall()
    return embedded_services.redis_url


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of a local S3 server that holds its objects in memory."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_bucket(s3_endpoint: str) -> S3Options:
    """A fresh bucket."""
    name = f"test-{uuid4().hex}"
    keys = {"aws_access_key_id": S3_KEY, "aws_secret_access_key": S3_SECRET}
    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name=S3_REGION, **keys)
    client.create_bucket(Bucket=name)
    client.close()
    return S3Options(
        bucket=name,
        endpoint=s3_endpoint,
        region=S3_REGION,
        prefix="some/prefix",
        access_key_id=S3_KEY,
        secret_access_key=S3_SECRET,
    )
