"""A real PostgreSQL and a real Valkey for every test that asks: one pair of servers per run, an empty migrated database and
an empty Valkey per test. Tests that ask for `postgres_major` run on another PostgreSQL too.
"""

import gc
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import boto3
import fastapi._compat.v2
import httpx._transports.default
import psycopg
import pytest
import redis
import structlog
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings
from moto.server import ThreadedMotoServer
from psycopg import sql
from pydantic import ConfigDict, TypeAdapter

from loraplex.adapters.storage.object_store import S3Options
from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS
from loraplex.platform.datastores.embedded.postgres import superuser_url
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.datastores.migrations import upgrade
from loraplex.tenants import database as tenants_database
from loraplex.tenants.database import Database
from loraplex.tenants.valkey import open_valkey

# Files that run side by side have a core each: threads of one would wait for those of the other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Drawing a traceback in colours and with all local variables takes a second of a test that provokes an error.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

# Every client would read all certificates again, which takes 30 ms.
transports = httpx._transports.default
transports.create_ssl_context = cache(transports.create_ssl_context)  # type: ignore[attr-defined]

# An application describes its routes by 1,800 types, most of them equal, which takes half a second per test that starts one.
ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter_of(annotated: Any, *, config: ConfigDict | None = None) -> TypeAdapter[Any]:
    """Return the adapter of a type with metadata. Kept ones keep what their metadata names."""
    annotation, *metadata = get_args(annotated)
    key = annotation, repr(metadata), repr(config)
    if key not in ADAPTERS:
        ADAPTERS[key] = TypeAdapter(annotated, config=config)
    return ADAPTERS[key]


fastapi._compat.v2.TypeAdapter = adapter_of  # type: ignore[assignment, attr-defined]

# A busy machine answers late. What is promised within some time has a bound of its own in its test.
for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, 60.0)
assert open_valkey.__kwdefaults__ is not None
open_valkey.__kwdefaults__["connect_s"] = 60.0
tenants_database.BOUND_SECONDS = tenants_database.SHORT_BOUND_SECONDS = 60.0
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A change is refused for what it breaks, and not for what chance finds: that is searched for with `--long`.
settings.register_profile("same examples", BUSY, derandomize=True)
settings.register_profile("new examples", BUSY)
settings.load_profile("same examples")

TEMPLATE = "template_migrated"
NEWEST_POSTGRES = max(POSTGRES_MAJORS)
DISCONNECT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
# Triggers and foreign keys keep rows that only an owner who means all of them may delete.
EMPTY = """
DO $$ DECLARE name text; BEGIN
    SET LOCAL session_replication_role = replica;
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'alembic_version' LOOP
        EXECUTE format('DELETE FROM %I', name);
    END LOOP;
    PERFORM setval(seqrelid, seqstart, false) FROM pg_sequence WHERE pg_sequence_last_value(seqrelid) IS NOT NULL;
END $$
"""
# One line for each column, trigger, policy, table and function, for what the database is set to, and the revision.
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
    UNION ALL SELECT concat_ws(' ', datallowconn, datconnlimit, setrole, setconfig)
        FROM pg_database LEFT JOIN pg_db_role_setting ON setdatabase = pg_database.oid WHERE datname = current_database()
    UNION ALL SELECT version_num FROM alembic_version
) AS schema
"""
S3_REGION, S3_KEY, S3_SECRET = "us-east-1", "test-key", "test-secret"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large-uploads", action="store_true", help="upload 300 MB, where it is 48 otherwise")
    parser.addoption("--long", action="store_true", help="run what is marked as long, too")


def pytest_configure(config: pytest.Config) -> None:
    """With `--long`, examples are drawn by chance. Nothing that is imported or collected is garbage."""
    gc.disable()
    if config.getoption("--long"):
        settings.load_profile("new examples")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is long and hardly ever breaks alone waits for `--long`."""
    if config.getoption("--long"):
        return
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip(reason="runs with --long"))


def pytest_collection_finish() -> None:
    """Ten thousand tests and their libraries stay. To look through them for garbage took a quarter of the tests' time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(5_000, 10, 10)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In place of `--dist=loadfile`."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.file_scheduling import SharedServers

    return SharedServers(config, log)


def url_of(services: EmbeddedServices, database: str) -> str:
    address, _, query = services.database_url.partition("?")
    return f"{address.rpartition('/')[0]}/{database}?{query}"


def execute(services: EmbeddedServices, statement: str, *names: str) -> None:
    with psycopg.connect(services.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


class KeptDatabase:
    """One database for test after test: emptied in a few milliseconds, where a new one takes some hundred. A test that
    left another schema or set the database to anything gets the next test a new one.
    """

    def __init__(self, services: EmbeddedServices, template: str) -> None:
        self._services = services
        self._template = template
        with psycopg.connect(url_of(services, template)) as connection:
            self._schema = connection.execute(SCHEMA).fetchone()
        self._url: str | None = None
        # Of its own from test to test: a new one reads the catalog again, which takes longer than to empty all tables.
        self._connection: psycopg.Connection | None = None

    def emptied(self) -> str:
        """Its address. What is still connected to it is disconnected."""
        if self._url is None or not self._empty(self._url):
            self.close()
            name = f"test_{uuid4().hex}"
            execute(self._services, "CREATE DATABASE {} TEMPLATE {}", name, self._template)
            self._url = url_of(self._services, name)
        return self._url

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _empty(self, url: str) -> bool:
        """Also where a test has ended this connection with all others; false where there can be none."""
        try:
            if self._connection is None or self._is_broken(self._connection):
                self.close()
                self._connection = psycopg.connect(url, autocommit=True)
            self._connection.execute(DISCONNECT)
            self._connection.execute(EMPTY)
            return self._connection.execute(SCHEMA).fetchone() == self._schema
        except psycopg.OperationalError:
            return False

    @staticmethod
    def _is_broken(connection: psycopg.Connection) -> bool:
        try:
            connection.execute("SELECT 1")
        except psycopg.OperationalError:
            return True
        return False


class AdministeredServices(EmbeddedServices):
    """Servers whose databases are made and dropped, and whose settings change: what only a superuser may."""

    @property
    def database_url(self) -> str:
        return superuser_url(self._folder, super().database_url)


class Servers:
    """One PostgreSQL of some major version beside a Valkey; databases are made when they are asked for."""

    def __init__(self, folder: Path, postgres_major: int) -> None:
        self.services = AdministeredServices(folder, postgres_major=postgres_major)
        self.services.start()
        # Nothing of these servers has to outlive a crash.
        execute(self.services, "ALTER SYSTEM SET fsync = off")
        execute(self.services, "SELECT pg_reload_conf()")

    @cached_property
    def template(self) -> str:
        """The name of a database at the newest schema, copied for each test."""
        execute(self.services, "CREATE DATABASE {}", TEMPLATE)
        upgrade(url_of(self.services, TEMPLATE))
        return TEMPLATE

    @cached_property
    def kept(self) -> KeptDatabase:
        return KeptDatabase(self.services, self.template)

    def close(self) -> None:
        if "kept" in self.__dict__:
            self.kept.close()
        self.services.stop()


@pytest.fixture(scope="session")
def servers_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Servers]]:
    """The servers of this test run by the major version of PostgreSQL: each starts with the first test that asks."""
    with ExitStack() as stack:

        @cache
        def started(postgres_major: int) -> Servers:
            servers = Servers(tmp_path_factory.mktemp("services"), postgres_major)
            stack.callback(servers.close)
            return servers

        yield started


@pytest.fixture
def postgres_major(request: pytest.FixtureRequest) -> int:
    """The newest one, unless a test is parametrized with others (`indirect`)."""
    return int(getattr(request, "param", NEWEST_POSTGRES))


@pytest.fixture(scope="session")
def embedded_services(servers_of: Callable[[int], Servers]) -> EmbeddedServices:
    """The newest servers of this test run; `database_url` is a bare database."""
    return servers_of(NEWEST_POSTGRES).services


@pytest.fixture
def empty_database_url(servers_of: Callable[[int], Servers], postgres_major: int) -> Iterator[str]:
    """The address of a fresh database without any table."""
    services, name = servers_of(postgres_major).services, f"test_{uuid4().hex}"
    execute(services, "CREATE DATABASE {}", name)
    yield url_of(services, name)
    execute(services, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture
def database_template(servers_of: Callable[[int], Servers], postgres_major: int) -> str:
    """The name of a database at the newest schema: with it the cluster has the roles."""
    return servers_of(postgres_major).template


@pytest.fixture
def database_url(servers_of: Callable[[int], Servers], postgres_major: int) -> str:
    """The address of a database at the newest schema without any row."""
    return servers_of(postgres_major).kept.emptied()


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
