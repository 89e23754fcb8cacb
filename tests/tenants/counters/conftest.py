"""The counters' tests run on Valkey and, where `redis-server` is installed, on Redis itself too, except the long ones."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from loraplex.platform.datastores.embedded.identity import Identity
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.datastores.embedded.short_folder import ShortFolder
from loraplex.platform.datastores.embedded.valkey import SOCKET_NAME, ValkeyServer

VALKEY, REDIS = "valkey", "redis"
BINARY = "redis-server"
ON_VALKEY_ALONE = frozenset(("test_counter_machine", "test_deadline"))
"""Modules that take long, or use no server."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if "valkey_url" in metafunc.fixturenames and module not in ON_VALKEY_ALONE:
        metafunc.parametrize("counter_server", (VALKEY, REDIS), indirect=True)


@pytest.fixture
def counter_server(request: pytest.FixtureRequest) -> str:
    """Which server has the counters of a test."""
    return str(getattr(request, "param", VALKEY))


@pytest.fixture(scope="session")
def redis_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Redis of its own. Its configuration is the embedded Valkey's."""
    binary = shutil.which(BINARY)
    if binary is None:
        pytest.skip(f"{BINARY} is not installed: the counters are tested on Valkey alone")
    folder = tmp_path_factory.mktemp("redis")
    server, short = ValkeyServer(folder, Path(binary), Identity()), ShortFolder()
    try:
        yield server.start(short.shorten(server.data, SOCKET_NAME))
    finally:
        server.stop()
        short.remove()


@pytest.fixture
def valkey_url(
    counter_server: str, embedded_services: EmbeddedServices, request: pytest.FixtureRequest
) -> str:
    """The address of an empty Valkey or Redis."""
    url = embedded_services.redis_url
    if counter_server == REDIS:
        url = request.getfixturevalue("redis_server_url")
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url
