"""Embedded servers that end are started again, by their owner or by the process that takes over; what cannot start is given up."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
import redis
from tests.platform.datastores.embedded.test_servers import eventually, finish, first_word, servers_of, spawn

from loraplex.platform.datastores.embedded import supervision
from loraplex.platform.datastores.embedded.errors import DataDirUnusable
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.datastores.embedded.supervision import REPAIRS, Supervision

BOUND_SECONDS = 60.0


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("supervised")


@pytest.fixture
def few_repairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For servers that start after it: they are given up soon."""
    monkeypatch.setattr(supervision, "REPAIRS", replace(REPAIRS, max_restarts=2))


@pytest.fixture
def services(data_dir: Path) -> Iterator[EmbeddedServices]:
    services = EmbeddedServices(data_dir)
    services.start()
    yield services
    services.stop()
    assert eventually(lambda: servers_of(data_dir) == [])


def answers(services: EmbeddedServices) -> Callable[[], bool]:
    """Whether both servers answer at the addresses of now."""
    database_url, redis_url = services.database_url, services.redis_url

    def answer() -> bool:
        try:
            psycopg.connect(database_url, connect_timeout=10).close()
            with redis.Redis.from_url(redis_url) as client:
                return bool(client.ping())
        except (psycopg.OperationalError, redis.ConnectionError):
            return False

    return answer


def test_unexpected_errors_are_failed_repairs(few_repairs: None) -> None:
    def unreadable() -> str | None:
        raise DataDirUnusable("the folder is gone")

    def failing() -> None:
        raise ZeroDivisionError("by zero")

    supervised = Supervision(unreadable, failing)
    supervised.start()
    assert supervised.lost.result(BOUND_SECONDS) == "ZeroDivisionError: by zero"
    supervised.stop()


def test_killed_servers_run_again_with_their_data(services: EmbeddedServices) -> None:
    ready = answers(services)
    with psycopg.connect(services.database_url) as connection:
        connection.execute("CREATE TABLE kept (id int)")
    with redis.Redis.from_url(services.redis_url) as client:
        client.set("kept", "yes")
        time.sleep(1.2)  # appendfsync everysec
        for number in (0, 1):
            before = services.pids[number]
            os.kill(before, signal.SIGKILL)
            assert eventually(lambda before=before: before not in services.pids and ready(), BOUND_SECONDS)  # type: ignore[misc]
        with psycopg.connect(services.database_url) as connection:
            assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
        assert client.get("kept") == b"yes"


def test_servers_that_cannot_start_are_given_up_with_the_reason(
    few_repairs: None, services: EmbeddedServices, data_dir: Path
) -> None:
    configuration = data_dir / "embedded" / "postgres" / "postgresql.conf"
    good = configuration.read_text()
    configuration.write_text(good + "\nno_such_setting = 1\n")
    try:
        os.kill(services.pids[0], signal.SIGKILL)
        assert "no_such_setting" in services.lost.result(BOUND_SECONDS)
    finally:
        configuration.write_text(good)
    with redis.Redis.from_url(services.redis_url) as client:
        assert client.ping()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_process_that_joined_takes_over(data_dir: Path, is_killed: bool) -> None:
    owner = spawn(data_dir)
    assert first_word(owner) == "owned"
    guest = EmbeddedServices(data_dir)
    guest.start()
    try:
        assert not guest.owned
        ready = answers(guest)
        if is_killed:
            owner.kill()
            owner.wait(60)
        else:
            finish(owner)
        assert eventually(lambda: guest.owned and ready(), BOUND_SECONDS)
        command = spawn(data_dir, "transient")
        assert first_word(command) == "joined"
        finish(command)
    finally:
        guest.stop()


def test_the_address_stays_when_the_path_is_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80) / "e"
    for is_killed in (True, False):
        owner = spawn(deep)
        assert first_word(owner) == "owned"
        guest = EmbeddedServices(deep)
        guest.start()
        try:
            ready = answers(guest)
            if is_killed:
                owner.kill()
                owner.wait(60)
            else:
                finish(owner)
            assert eventually(lambda guest=guest, ready=ready: guest.owned and ready(), BOUND_SECONDS)  # type: ignore[misc]
            assert not guest.lost.done()
        finally:
            guest.stop()
