"""The embedded servers: started, shared, killed with their owner, and recovered after it."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from loraplex.platform.datastores.embedded import postgres
from loraplex.platform.datastores.embedded import servers as services_module
from loraplex.platform.datastores.embedded.binaries import (
    copy_postgres,
    copy_valkey,
    find_postgres,
    find_valkey,
)
from loraplex.platform.datastores.embedded.child import GUARDED_EXEC, Child, ChildCommand
from loraplex.platform.datastores.embedded.errors import DataDirUnusable, ServiceFailed
from loraplex.platform.datastores.embedded.guarded_exec import PARENT_GONE
from loraplex.platform.datastores.embedded.orphans import processes_inside
from loraplex.platform.datastores.embedded.postgres import superuser_url
from loraplex.platform.datastores.embedded.servers import EmbeddedServices

OWNER = """
import sys, time
from pathlib import Path
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
services = EmbeddedServices(Path(sys.argv[1]), transient=sys.argv[2] == "transient")
services.start()
print("owned" if services.owned else "joined", services.database_url, flush=True)
sys.stdin.read()
services.stop()
"""


def spawn(data_dir: Path, kind: str = "lasting") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(data_dir), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def first_word(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().split()[0]


def finish(process: subprocess.Popen[str]) -> None:
    process.communicate("", timeout=120)


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def servers_of(data_dir: Path) -> list[int]:
    embedded = data_dir / "embedded"
    return [each.pid for name in ("postgres", "valkey") for each in processes_inside(embedded / name)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One initialised data directory for the module; every test leaves it without servers."""
    return tmp_path_factory.mktemp("embedded")


@pytest.fixture(autouse=True)
def nothing_left(data_dir: Path) -> Iterator[None]:
    yield
    assert eventually(lambda: servers_of(data_dir) == [])


async def test_data_survives_a_restart(data_dir: Path) -> None:
    async with EmbeddedServices(data_dir) as services:
        with psycopg.connect(services.database_url) as connection:
            connection.execute("CREATE TABLE kept (id int)")
        with redis.Redis.from_url(services.redis_url) as client:
            client.set("kept", "yes")
        assert len(services.pids) == 2
    begun = time.monotonic()
    async with EmbeddedServices(data_dir) as services:
        started = time.monotonic() - begun
        with psycopg.connect(services.database_url) as connection:
            assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
            assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
        with redis.Redis.from_url(services.redis_url) as client:
            assert client.get("kept") == b"yes"
    assert started < 10


async def test_only_we_get_in(data_dir: Path) -> None:
    async with EmbeddedServices(data_dir) as services:
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(without_password(services.database_url))
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(without_password(services.redis_url)).ping()
        with psycopg.connect(superuser_url(data_dir / "embedded", services.database_url)) as connection:
            kinds = connection.execute("SELECT DISTINCT auth_method FROM pg_hba_file_rules").fetchall()
            assert kinds == [("scram-sha-256",)]
        for pid in services.pids:
            command = Path(f"/proc/{pid}/cmdline").read_text()
            assert services.database_url.split(":")[2].split("@")[0] not in command
            assert services.redis_url.split(":")[2].split("@")[0] not in command
            assert Path(f"/proc/{pid}").stat().st_uid != 0


def without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    user = rest.partition(":")[0]
    return f"{scheme}://{user}{'@' if user else ''}{rest.partition('@')[2]}"


async def test_files_are_private_and_parents_untouched(data_dir: Path) -> None:
    before = [(parent.stat().st_mode, parent.stat().st_uid) for parent in data_dir.parents]
    async with EmbeddedServices(data_dir):
        embedded = data_dir / "embedded"
        for path in (embedded, embedded / "postgres", embedded / "valkey"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        for path in embedded.iterdir():
            assert path.is_dir() or stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert (embedded / "services.json").exists()
    assert not (data_dir / "embedded" / "services.json").exists()
    assert before == [(parent.stat().st_mode, parent.stat().st_uid) for parent in data_dir.parents]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_owner_leaves_no_process_and_the_next_recovers(
    data_dir: Path, number: signal.Signals
) -> None:
    owner = spawn(data_dir)
    assert first_word(owner) == "owned"
    assert len(servers_of(data_dir)) > 2
    owner.send_signal(number)
    owner.wait(60)
    assert eventually(lambda: servers_of(data_dir) == [])
    assert (data_dir / "embedded" / "services.json").exists()
    services = EmbeddedServices(data_dir)
    services.start()
    try:
        assert services.owned
        psycopg.connect(services.database_url).close()
    finally:
        services.stop()


async def test_a_start_that_is_cancelled_stops_what_it_started(data_dir: Path) -> None:
    """As where the engine beside it does not start: a database that is not stopped has to recover at the next start."""
    postmaster = data_dir / "embedded" / "postgres" / "postmaster.pid"
    starting = asyncio.create_task(EmbeddedServices(data_dir).__aenter__())
    while not (postmaster.exists() or starting.done()):
        await asyncio.sleep(0.01)
    for _ in range(2):
        starting.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert eventually(lambda: servers_of(data_dir) == []), "the second one does not keep it from stopping"


def test_the_next_owner_does_not_wait_for_the_dead_ones_servers(data_dir: Path) -> None:
    owner = spawn(data_dir)
    first_word(owner)
    owner.kill()
    owner.wait(60)
    services = EmbeddedServices(data_dir)
    services.start()
    try:
        assert services.owned
        psycopg.connect(services.database_url).close()
    finally:
        services.stop()


def test_a_pid_file_that_names_somebody_else(data_dir: Path) -> None:
    services = EmbeddedServices(data_dir)
    services.start()
    pid_file = data_dir / "embedded" / "postgres" / "postmaster.pid"
    content = pid_file.read_text()
    services.stop()
    pid_file.write_text(content.replace(content.split()[0], str(os.getppid()), 1))
    services = EmbeddedServices(data_dir)
    services.start()
    services.stop()
    assert not pid_file.exists()


def test_others_join_and_an_owner_without_guests_stops_at_once(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services_module, "GUEST_SECONDS", 120.0)
    owner = EmbeddedServices(data_dir, transient=True)
    owner.start()
    guest = spawn(data_dir, "transient")
    assert first_word(guest) == "joined"
    finish(guest)
    begun = time.monotonic()
    owner.stop()
    assert time.monotonic() - begun < 60


def test_a_lasting_process_does_not_depend_on_a_transient_owner(data_dir: Path) -> None:
    command = spawn(data_dir, "transient")
    assert first_word(command) == "owned"
    server = spawn(data_dir)
    time.sleep(0.5)
    finish(command)
    assert first_word(server) == "owned"
    finish(server)


def test_an_owner_that_stops_while_a_guest_works(data_dir: Path) -> None:
    owner = spawn(data_dir, "transient")
    first_word(owner)
    guest = EmbeddedServices(data_dir, transient=True)
    guest.start()
    assert not guest.owned and guest.pids == []
    assert owner.stdin is not None
    owner.stdin.close()
    time.sleep(0.5)
    psycopg.connect(guest.database_url).close()
    guest.stop()
    owner.wait(60)


def test_a_path_too_long_for_a_socket(tmp_path: Path, data_dir: Path) -> None:
    deep = tmp_path / ("d" * 80) / "ä b%c?" / "e"
    services = EmbeddedServices(deep)
    services.start()
    short = Path(services.database_url.partition("host=")[2])
    try:
        psycopg.connect(services.database_url).close()
        redis.Redis.from_url(services.redis_url).ping()
        # 0700, or 0711 where the servers' binaries are copied next to it: other users may traverse it, not list it.
        assert short.is_symlink() and stat.S_IMODE(short.parent.stat().st_mode) & 0o066 == 0
    finally:
        services.stop()
    assert not short.parent.exists()


def test_an_unfinished_cluster_is_made_again(tmp_path: Path, data_dir: Path) -> None:
    unfinished = tmp_path / "embedded" / "postgres.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "PG_VERSION").write_text("18\n")
    services = EmbeddedServices(tmp_path)
    services.start()
    services.stop()
    assert not unfinished.exists()


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(data_dir: Path) -> None:
    configuration = data_dir / "embedded" / "postgres" / "postgresql.conf"
    good = configuration.read_text()
    configuration.write_text(good + "\nno_such_setting = 1\n")
    try:
        services = EmbeddedServices(data_dir)
        with pytest.raises(ServiceFailed, match="no_such_setting"):
            services.start()
        services.stop()
    finally:
        configuration.write_text(good)
    assert servers_of(data_dir) == []


def test_a_server_that_accepts_and_never_answers_ends_the_start(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hung(Child):
        def __init__(self, command: ChildCommand) -> None:
            super().__init__(command)
            assert eventually(lambda: (command.folder / postgres.SOCKET_NAME).exists())
            os.kill(self.pid, signal.SIGSTOP)

    first = EmbeddedServices(data_dir)
    first.start()
    first.stop()
    monkeypatch.setattr(postgres, "Child", Hung)
    monkeypatch.setattr(postgres, "START_SECONDS", 1.0)
    monkeypatch.setattr(postgres, "CONNECT_SECONDS", 2)
    monkeypatch.setattr(postgres.PostgresServer, "stop_steps", ((signal.SIGINT, 0.1),))
    with pytest.raises(ServiceFailed, match="PostgreSQL did not accept connections within 1 s"):
        EmbeddedServices(data_dir).start()
    assert servers_of(data_dir) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to another user")
def test_binaries_that_the_unprivileged_user_cannot_reach(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    postgres, valkey = copy_postgres(find_postgres(), hidden), copy_valkey(find_valkey(), hidden)
    monkeypatch.setattr(services_module, "find_postgres", lambda major: postgres)
    monkeypatch.setattr(services_module, "find_valkey", lambda: valkey)
    services = EmbeddedServices(data_dir)
    services.start()
    executables = [Path(os.readlink(f"/proc/{pid}/exe")) for pid in services.pids]
    services.stop()
    assert not any(path.is_relative_to(hidden) or path.exists() for path in executables)


def test_a_child_whose_parent_is_already_dead_does_not_start(tmp_path: Path) -> None:
    made = tmp_path / "made"
    command = [sys.executable, "-I", "-S", str(GUARDED_EXEC), "1", "9", "-1", "-1", "/bin/touch", str(made)]
    assert subprocess.run(command, check=False).returncode == PARENT_GONE
    assert not made.exists()


def test_a_data_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirUnusable, match="file"):
        EmbeddedServices(tmp_path / "file").start()


def test_not_started() -> None:
    with pytest.raises(ServiceFailed, match="not started"):
        _ = EmbeddedServices(Path("/nonexistent")).database_url
