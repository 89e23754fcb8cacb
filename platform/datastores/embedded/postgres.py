"""The embedded PostgreSQL: one cluster folder, one foreground server, SCRAM passwords, a unix socket and no TCP port.

Invariant: the server accesses its files through its working directory, so the data directory may be below folders that only
root may enter. A cluster has its final name only after initdb has finished.
"""

import shutil
import signal
import time
from functools import partial
from pathlib import Path

import psycopg

from loraplex.platform.datastores.embedded.binaries import PostgresBinaries
from loraplex.platform.datastores.embedded.child import Child, ChildCommand, ChildServer
from loraplex.platform.datastores.embedded.errors import DataDirUnusable, ServiceFailed
from loraplex.platform.datastores.embedded.identity import Identity, own_folder
from loraplex.platform.datastores.embedded.orphans import end_orphans
from loraplex.platform.datastores.embedded.passwords import kept_password
from loraplex.platform.datastores.embedded.server_role import (
    DATABASE,
    SERVER_ROLE,
    SUPERUSER,
    prepare_database,
)

SOCKET_NAME = ".s.PGSQL.5432"
HERE = "/proc/self/cwd"
INITDB_SECONDS = 120.0
START_SECONDS = 60.0
CONNECT_SECONDS = 5
"""A server that is stopped accepts connections and never answers."""
SUPERUSER_PASSWORD = "postgres.password"
SERVER_PASSWORD = "postgres.server.password"
STOP_STEPS = ((signal.SIGINT, 20.0), (signal.SIGQUIT, 6.0))
SETTINGS = {
    "listen_addresses": "",
    "unix_socket_directories": HERE,
    "unix_socket_permissions": "0700",
    "password_encryption": "scram-sha-256",
    "fsync": "on",
    "max_connections": "100",
    "log_checkpoints": "off",
    "timezone": "UTC",
}


def superuser_url(folder: Path, url: str) -> str:
    """The superuser's address of the database at `url`, which is the server role's. `folder` is that of the embedded services."""
    password = kept_password(folder / SUPERUSER_PASSWORD)
    return f"postgresql://{SUPERUSER}:{password}@/{DATABASE}?{url.partition('?')[2]}"


def cluster_major(cluster: Path) -> int | None:
    """The major version that created an existing cluster; None if there is no cluster. Raises `DataDirUnusable`."""
    version = cluster / "PG_VERSION"
    try:
        return int(version.read_bytes().split(b".")[0]) if version.exists() else None
    except ValueError as error:
        raise DataDirUnusable(f"{version} is damaged: restore a backup into a new --data-dir") from error


class PostgresServer(ChildServer):
    """Starts and stops the server of one cluster."""

    name = "PostgreSQL"
    socket_name = SOCKET_NAME
    stop_steps = STOP_STEPS

    def __init__(self, folder: Path, binaries: PostgresBinaries, identity: Identity) -> None:
        """`folder` is an existing folder of the embedded services; the cluster is in `folder/postgres`."""
        super().__init__()
        self.data = folder / "postgres"
        self._binaries = binaries
        self._identity = identity
        self._superuser_password = kept_password(folder / SUPERUSER_PASSWORD)
        self._password = kept_password(folder / SERVER_PASSWORD)
        self._log = folder / "postgres.log"

    def start(self, socket_folder: Path) -> str:
        """Start the server and return its URL. `socket_folder` is a path to the cluster short enough for a unix socket.

        After a crash PostgreSQL recovers from its log first.
        """
        if cluster_major(self.data) is None:
            self._create_cluster()
        end_orphans(self.data, self._identity)
        for stale in (self.data / "postmaster.pid", self.data / f"{SOCKET_NAME}.lock"):
            stale.unlink(missing_ok=True)
        settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
        arguments = (str(self._binaries.server), "-D", HERE, *settings)
        self._child = Child(self._command(arguments, self.data, signal.SIGQUIT))
        self._wait_ready(socket_folder)
        return f"postgresql://{SERVER_ROLE}:{self._password}@/{DATABASE}?host={socket_folder}"

    def _create_cluster(self) -> None:
        if self.data.exists() and any(self.data.iterdir()):
            raise DataDirUnusable(f"{self.data} has no PG_VERSION: move it away, and restore a backup")
        unfinished = self.data.with_name("postgres.unfinished")
        if unfinished.exists():
            shutil.rmtree(unfinished)
        own_folder(unfinished, self._identity)
        arguments = (
            *(str(self._binaries.initdb), "-D", HERE, f"--username={SUPERUSER}", "--pwfile=/proc/self/fd/0"),
            *("--auth=scram-sha-256", "--no-locale", "--encoding=UTF8"),
        )
        child = Child(self._command(arguments, unfinished, signal.SIGKILL, self._superuser_password + "\n"))
        if child.wait(INITDB_SECONDS) != 0:
            raise child.failure("(initdb) could not create the database cluster")
        unfinished.rename(self.data)

    def _command(
        self, arguments: tuple[str, ...], folder: Path, death: signal.Signals, text: str = ""
    ) -> ChildCommand:
        remedy = "restore a backup into a new --data-dir"
        return ChildCommand(self.name, arguments, folder, self._log, self._identity, death, remedy, text)

    def _wait_ready(self, socket_folder: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return prepare_database(partial(self._connect, socket_folder), self._password)
            except psycopg.OperationalError as error:
                self._check_progress(deadline, error)
            except psycopg.Error as error:
                raise ServiceFailed(f"PostgreSQL refuses its administration: {error}") from error
            time.sleep(0.02)

    def _check_progress(self, deadline: float, error: psycopg.OperationalError) -> None:
        if self._child is None:
            raise ServiceFailed("PostgreSQL was stopped while it started")
        self._child.check_running()
        if "password authentication failed" in str(error):
            raise ServiceFailed(
                f"PostgreSQL rejects the password in {self._log.with_name(SUPERUSER_PASSWORD)}: put the old one back"
            )
        if time.monotonic() > deadline:
            raise self._child.failure(f"did not accept connections within {START_SECONDS:g} s ({error})")

    def _connect(self, socket_folder: Path, database: str) -> psycopg.Connection:
        return psycopg.connect(
            host=str(socket_folder),
            user=SUPERUSER,
            password=self._superuser_password,
            dbname=database,
            autocommit=True,
            connect_timeout=CONNECT_SECONDS,
        )
