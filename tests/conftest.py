"""A real PostgreSQL and a real Valkey for every test that asks: one pair of servers per run, a fresh migrated database and
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
S3_REGION, S3_KEY, S3_SECRET = "us-east-1", "test-key", "test-secret"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large-uploads", action="store_true", help="upload 300 MB, where it is 48 otherwise")


def url_of(services: EmbeddedServices, database: str) -> str:
    address, _, query = services.database_url.partition("?")
    return f"{address.rpartition('/')[0]}/{database}?{query}"


def execute(services: EmbeddedServices, statement: str, *names: str) -> None:
    with psycopg.connect(services.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@pytest.fixture(scope="session")
def embedded_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServices]:
    """The servers of this test run; `database_url` is a bare database."""
    services = EmbeddedServices(tmp_path_factory.mktemp("services"))
    services.start()
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


@pytest.fixture
def database_url(embedded_services: EmbeddedServices, database_template: str) -> Iterator[str]:
    """The address of a fresh database at the newest schema."""
    name = f"test_{uuid4().hex}"
    execute(embedded_services, "CREATE DATABASE {} TEMPLATE {}", name, database_template)
    yield url_of(embedded_services, name)
    execute(embedded_services, "DROP DATABASE {} WITH (FORCE)", name)


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
