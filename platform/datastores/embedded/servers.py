"""The embedded PostgreSQL and Valkey of one data directory: owned by the first process, shared with the others.

Invariant: the servers live exactly as long as their owner, also when it is killed; see guarded_exec. Their addresses stay the same
while any process uses them, also when another one starts them.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

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
from loraplex.platform.datastores.embedded.postgres import PostgresServer, cluster_major
from loraplex.platform.datastores.embedded.short_folder import ShortFolder
from loraplex.platform.datastores.embedded.supervision import Supervision

SERVICES_FOLDER = "embedded"
"""The folder of both servers below a data directory."""
ATTACH_SECONDS = 60.0
GUEST_SECONDS = 10.0
COPY_MODE = 0o711

ResultT = TypeVar("ResultT")


class EmbeddedServices:
    """Owns or joins the servers of `data_dir`.

    `transient` is for commands that end soon: a long-lived process waits until a transient owner has ended, instead of
    joining it. A long-lived owner restarts servers that end; one that has joined starts them when the owner has ended, and
    owns them from then on. A separate thread starts the children, because they die with the thread that started them. A new
    cluster has the version `postgres_major`, by default the newest one; an existing cluster keeps its version.
    """

    def __init__(self, data_dir: Path, *, transient: bool = False, postgres_major: int | None = None) -> None:
        self._folder = data_dir.absolute() / SERVICES_FOLDER
        self._postgres_major = postgres_major
        self._transient = transient
        self._keeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedded-services")
        self._lock: OwnerLock | None = None
        self._facts: ConnectionFacts | None = None
        self._owner: ServerPair | None = None
        self._supervision = Supervision(self._on_keeper(self._ailing), self._on_keeper(self._repair))
        self._stopping = threading.Lock()
        self._stopped = False

    @property
    def lost(self) -> Future[str]:
        """Gets the reason when the servers cannot be kept running; the process must end then."""
        return self._supervision.lost

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
        if not self._transient:
            self._supervision.start()

    def stop(self) -> None:
        """Stop what is started, or is being started. A second time does nothing."""
        self._supervision.stop()
        with self._stopping:
            if not self._stopped:
                self._stopped = True
                try:
                    self._keeper.submit(self._stop).result()
                finally:
                    self._keeper.shutdown()

    async def __aenter__(self) -> Self:
        try:
            await asyncio.to_thread(self.start)
        except asyncio.CancelledError:
            # The thread goes on: what it starts would be left without a stop, and PostgreSQL would have to recover.
            await asyncio.shield(asyncio.to_thread(self.stop))
            raise
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
        left = lock.facts()
        lock.withdraw()
        self._facts = self._start_owned(lock, left)
        return True

    def _start_owned(self, lock: OwnerLock, before: ConnectionFacts | None) -> ConnectionFacts:
        """Start the servers that do not run, where possible under the addresses of `before`."""
        if self._owner is None:
            short = None if before is None or before.short_folder is None else Path(before.short_folder)
            self._owner = ServerPair(self._folder, self._postgres_major, short)
        facts = self._owner.start(self._transient)
        lock.publish(facts)
        return facts

    def _join(self, lock: OwnerLock) -> bool:
        facts = lock.facts()
        if facts is None or (facts.transient and not self._transient) or not lock.try_join(facts):
            return False
        is_alive = alive(facts)
        if not is_alive or not self._transient:
            # A long-lived process needs no owner that waits for it: it takes over.
            lock.release()
        if is_alive:
            self._facts = facts
        return is_alive

    def _on_keeper(self, work: Callable[[], ResultT]) -> Callable[[], ResultT]:
        return lambda: self._keeper.submit(work).result()

    def _ailing(self) -> str | None:
        """What is wrong, if anything: an owned server has ended, or the owner of joined ones, which this process now owns."""
        if self._owner is not None:
            ended = self._owner.ended
            return f"{' and '.join(ended)} ended" if ended else None
        gone = self._lock is not None and self._lock.try_own()
        return "the process that owned the servers ended" if gone else None

    def _repair(self) -> None:
        if self._lock is None:
            raise ServiceFailed("the embedded services are not started")
        before = self._started()
        facts = self._start_owned(self._lock, before)
        if (facts.database_url, facts.redis_url) != (before.database_url, before.redis_url):
            raise ServiceFailed(f"the addresses below {self._folder} changed while they were in use")
        self._facts = facts

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
    """Both servers and their user; used by the owner only."""

    def __init__(self, folder: Path, postgres_major: int | None, short_folder: Path | None) -> None:
        """`short_folder`: that of the owner before, if it had one."""
        self._short = ShortFolder(short_folder)
        identity = choose_identity(folder / "postgres")
        postgres = find_postgres(cluster_major(folder / "postgres") or postgres_major)
        valkey_binary = find_valkey()
        if not identity.may_traverse(postgres.server) or not identity.may_traverse(valkey_binary):
            reachable = self._reachable_folder(identity)
            postgres = copy_postgres(postgres, reachable)
            valkey_binary = copy_valkey(valkey_binary, reachable)
        self._postgres = PostgresServer(folder, postgres, identity)
        self._valkey = valkey.ValkeyServer(folder, valkey_binary, identity)
        self._urls: dict[str, str] = {}

    @property
    def pids(self) -> list[int]:
        return [pid for pid in (self._postgres.pid, self._valkey.pid) if pid is not None]

    @property
    def ended(self) -> list[str]:
        """The names of the servers that do not run."""
        return [server.name for server in (self._postgres, self._valkey) if not server.running()]

    def start(self, transient: bool) -> ConnectionFacts:
        """Start the servers that do not run. Raises `ServiceFailed`; a server that failed is stopped."""
        for server in (self._valkey, self._postgres):
            if not server.running():
                self._urls[server.name] = self._start(server)
        short = None if self._short.path is None else str(self._short.path)
        database_url, redis_url = self._urls[self._postgres.name], self._urls[self._valkey.name]
        return ConnectionFacts(os.getpid(), transient, database_url, redis_url, short)

    def _start(self, server: PostgresServer | valkey.ValkeyServer) -> str:
        try:
            return server.start(self._short.shorten(server.data, server.socket_name))
        except BaseException:
            server.stop()
            raise

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
        facts = OwnerLock(data_dir.absolute() / SERVICES_FOLDER).facts()
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
