"""The embedded PostgreSQL and Valkey of one data directory: owned by the first process, shared with the others.

Invariant: the servers live exactly as long as their owner, also when it is killed; see guarded_exec.
"""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

from loraplex.platform.datastores.embedded import valkey
from loraplex.platform.datastores.embedded.binaries import (
    copy_postgres,
    copy_valkey,
    find_postgres,
    find_valkey,
)
from loraplex.platform.datastores.embedded.errors import DataDirUnusable, EmbeddedError, ServiceFailed
from loraplex.platform.datastores.embedded.identity import Identity, choose_identity
from loraplex.platform.datastores.embedded.lock import ConnectionFacts, OwnerLock
from loraplex.platform.datastores.embedded.postgres import (
    SOCKET_NAME,
    PostgresServer,
    cluster_major,
    kept_password,
)
from loraplex.platform.datastores.embedded.short_folder import ShortFolder, remove_short_folder

ATTACH_SECONDS = 60.0
GUEST_SECONDS = 10.0
COPY_MODE = 0o711


class EmbeddedServices:
    """Owns or joins the servers of `data_dir`.

    `transient` is for commands that end soon: a long-lived process waits until a transient owner has ended, instead of
    joining it. A separate thread starts the children, because they die with the thread that started them. A new cluster
    has the version `postgres_major`, by default the newest one; an existing cluster keeps its version.
    """

    def __init__(self, data_dir: Path, *, transient: bool = False, postgres_major: int | None = None) -> None:
        self._folder = data_dir.absolute() / "embedded"
        self._postgres_major = postgres_major
        self._transient = transient
        self._keeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedded-services")
        self._lock: OwnerLock | None = None
        self._facts: ConnectionFacts | None = None
        self._owner: ServerPair | None = None

    @property
    def database_url(self) -> str:
        return self._started().database_url

    @property
    def redis_url(self) -> str:
        return self._started().redis_url

    @property
    def owned(self) -> bool:
        """Whether this process owns the servers."""
        return self._owner is not None

    @property
    def pids(self) -> list[int]:
        """The servers' process ids; empty for a guest."""
        return [] if self._owner is None else self._owner.pids

    def start(self) -> None:
        """Start or join the servers. Raises `EmbeddedError`; then no process is left running."""
        try:
            self._keeper.submit(self._start).result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._keeper.submit(self._stop).result()
        self._keeper.shutdown()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def _started(self) -> ConnectionFacts:
        if self._facts is None:
            raise ServiceFailed("the embedded services are not started")
        return self._facts

    def _start(self) -> None:
        make_private(self._folder)
        self._lock = OwnerLock(self._folder)
        deadline = time.monotonic() + ATTACH_SECONDS
        while not self._own(self._lock) and not self._join(self._lock):
            if time.monotonic() > deadline:
                raise ServiceFailed(f"another process owns {self._folder} but its servers do not respond")
            time.sleep(0.05)

    def _own(self, lock: OwnerLock) -> bool:
        if not lock.try_own():
            return False
        if (left := lock.facts()) is not None and left.short_folder is not None:
            remove_short_folder(Path(left.short_folder))
        lock.withdraw()
        self._owner = ServerPair(self._folder, self._postgres_major)
        self._facts = self._owner.start(self._transient)
        lock.publish(self._facts)
        return True

    def _join(self, lock: OwnerLock) -> bool:
        facts = lock.facts()
        if facts is None or (facts.transient and not self._transient) or not lock.try_join(facts):
            return False
        if not alive(facts):
            lock.release()
            return False
        self._facts = facts
        return True

    def _stop(self) -> None:
        if self._lock is None:
            return
        if self._owner is not None:
            self._lock.withdraw()
            self._lock.wait_for_guests(GUEST_SECONDS)
            self._owner.stop()
        self._lock.release()
        self._lock = self._facts = self._owner = None


class ServerPair:
    """Both servers, their passwords and their user; used by the owner only."""

    def __init__(self, folder: Path, postgres_major: int | None) -> None:
        self._short = ShortFolder()
        identity = choose_identity(folder / "postgres")
        postgres = find_postgres(cluster_major(folder / "postgres") or postgres_major)
        valkey_binary = find_valkey()
        if not identity.may_traverse(postgres.server) or not identity.may_traverse(valkey_binary):
            reachable = self._reachable_folder(identity)
            postgres = copy_postgres(postgres, reachable)
            valkey_binary = copy_valkey(valkey_binary, reachable)
        password = kept_password(folder / "postgres.password")
        self._postgres = PostgresServer(folder, postgres, identity, password)
        password = kept_password(folder / "valkey.password")
        self._valkey = valkey.ValkeyServer(folder, valkey_binary, identity, password)

    @property
    def pids(self) -> list[int]:
        return [pid for pid in (self._postgres.pid, self._valkey.pid) if pid is not None]

    def start(self, transient: bool) -> ConnectionFacts:
        try:
            redis_url = self._valkey.start(self._short.shorten(self._valkey.data, valkey.SOCKET_NAME))
            database_url = self._postgres.start(self._short.shorten(self._postgres.cluster, SOCKET_NAME))
        except BaseException:
            self.stop()
            raise
        short = None if self._short.path is None else str(self._short.path)
        return ConnectionFacts(os.getpid(), transient, database_url, redis_url, short)

    def stop(self) -> None:
        self._valkey.stop()
        self._postgres.stop()
        self._short.remove()

    def _reachable_folder(self, identity: Identity) -> Path:
        folder = self._short.make(COPY_MODE)
        if not identity.may_traverse(folder / "binaries"):
            self._short.remove()
            raise DataDirUnusable(
                f"uid {identity.uid} can reach neither the installed server binaries nor {folder.parent}; "
                "install loraplex where every user may read it, or point TMPDIR to such a folder"
            )
        return folder


def running_redis_url(data_dir: Path) -> str | None:
    """The address of the Valkey that another process runs in `data_dir`, if this process may use it. Starts nothing."""
    try:
        facts = OwnerLock(data_dir.absolute() / "embedded").facts()
        return facts.redis_url if facts is not None and valkey.answers(facts.redis_url) else None
    except (EmbeddedError, OSError):
        # The folder belongs to another user or is not in use any more: this process has no Valkey there.
        return None


def make_private(folder: Path) -> None:
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise DataDirUnusable(f"the data directory {folder.parent} cannot be created: {error}") from error


def alive(facts: ConnectionFacts) -> bool:
    """Whether both servers of another process respond."""
    try:
        with psycopg.connect(facts.database_url, connect_timeout=2):
            return valkey.answers(facts.redis_url)
    except psycopg.OperationalError:
        return False
