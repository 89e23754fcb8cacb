"""The embedded PostgreSQL: one cluster folder, one foreground server, SCRAM passwords, a unix socket and no TCP port.

Invariant: the server accesses its files through its working directory, so the data directory may be below folders that only
root may enter. A cluster has its final name only after initdb has finished.
"""

import contextlib
import os
import secrets
import shutil
import signal
import time
from pathlib import Path

import psycopg
from psycopg import sql

from loraplex.platform.datastores.embedded.binaries import PostgresBinaries
from loraplex.platform.datastores.embedded.child import Child, ChildCommand
from loraplex.platform.datastores.embedded.errors import ServiceFailed
from loraplex.platform.datastores.embedded.identity import Identity, own_folder

ROLE = "loraplex"
DATABASE = "loraplex"
SOCKET_NAME = ".s.PGSQL.5432"
HERE = "/proc/self/cwd"
INITDB_SECONDS = 120.0
START_SECONDS = 60.0
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


def cluster_major(cluster: Path) -> int | None:
    """The major version that created an existing cluster; None if there is no cluster."""
    version = cluster / "PG_VERSION"
    return int(version.read_text().split(".")[0]) if version.exists() else None


class PostgresServer:
    """Starts and stops the server of one cluster. The thread that owns the children makes all calls."""

    def __init__(self, folder: Path, binaries: PostgresBinaries, identity: Identity, password: str) -> None:
        """`folder` is an existing folder of the embedded services; the cluster lives in `folder/postgres`."""
        self.cluster = folder / "postgres"
        self._binaries = binaries
        self._identity = identity
        self._password = password
        self._log = folder / "postgres.log"
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def start(self, socket_folder: Path) -> str:
        """Start the server and return the database URL. `socket_folder` is a path to the cluster short enough for a unix socket."""
        if cluster_major(self.cluster) is None:
            self._create_cluster()
        end_orphans(self.cluster)
        settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
        arguments = (str(self._binaries.server), "-D", HERE, *settings)
        self._child = Child(self._command(arguments, self.cluster, signal.SIGQUIT))
        self._wait_ready(socket_folder)
        return f"postgresql://{ROLE}:{self._password}@/{DATABASE}?host={socket_folder}"

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop(STOP_STEPS)
            self._child = None

    def _create_cluster(self) -> None:
        unfinished = self.cluster.with_name("postgres.unfinished")
        if unfinished.exists():
            shutil.rmtree(unfinished)
        own_folder(unfinished, self._identity)
        arguments = (
            *(str(self._binaries.initdb), "-D", HERE, f"--username={ROLE}", "--pwfile=/proc/self/fd/0"),
            *("--auth=scram-sha-256", "--no-locale", "--encoding=UTF8"),
        )
        child = Child(self._command(arguments, unfinished, signal.SIGKILL, self._password + "\n"))
        if child.wait(INITDB_SECONDS) != 0:
            raise child.failure("(initdb) could not create the database cluster")
        unfinished.rename(self.cluster)

    def _command(
        self, arguments: tuple[str, ...], folder: Path, death: signal.Signals, text: str = ""
    ) -> ChildCommand:
        return ChildCommand("PostgreSQL", arguments, folder, self._log, self._identity, death, text)

    def _wait_ready(self, socket_folder: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return self._create_database(socket_folder)
            except psycopg.OperationalError as error:
                self._check_progress(deadline, error)
            time.sleep(0.02)

    def _check_progress(self, deadline: float, error: psycopg.OperationalError) -> None:
        if self._child is None:
            raise ServiceFailed("PostgreSQL was stopped while it started")
        self._child.check_running()
        if time.monotonic() > deadline:
            raise self._child.failure(f"did not accept connections within {START_SECONDS:g} s ({error})")

    def _create_database(self, socket_folder: Path) -> None:
        with psycopg.connect(
            host=str(socket_folder), user=ROLE, password=self._password, dbname="postgres", autocommit=True
        ) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
            if found is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))


def end_orphans(folder: Path, seconds: float = 10.0) -> None:
    """End the servers of a dead owner: every process whose working directory is `folder`, and only those.

    Such a server is already shutting down. An old postmaster.pid is not used, because its process id may have been reused.
    """
    begun = time.monotonic()
    while orphans := processes_inside(folder):
        waited = time.monotonic() - begun
        if waited > seconds:
            raise ServiceFailed(f"processes {orphans} still use {folder}; end them first")
        if waited > seconds / 2:
            for pid in orphans:
                end_process(pid)
        time.sleep(0.02)
    for stale in (folder / "postmaster.pid", folder / f"{SOCKET_NAME}.lock"):
        stale.unlink(missing_ok=True)


def processes_inside(folder: Path) -> list[int]:
    """The ids of processes whose working directory is `folder`."""
    target = str(folder.resolve())
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if working_folder(entry) == target]


def working_folder(process: Path) -> str | None:
    try:
        return os.readlink(process / "cwd")
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return None


def end_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def new_password() -> str:
    return secrets.token_urlsafe(32)


def kept_password(path: Path) -> str:
    """Read the password in `path` (mode 0600); generate it on first use."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    password = new_password()
    with os.fdopen(descriptor, "w") as file:
        file.write(password)
    return password
