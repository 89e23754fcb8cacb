"""`VersionLifecycle`: turns an uploaded folder into a version that is ready, or rejected with a reason.

Invariant: every registered version ends ready or rejected, also when its gateway dies: another process resumes its
files, and one without files is rejected after a time. A state changes only from the state it was read in.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

import structlog

from loraplex.adapters.errors import (
    AdaptersError,
    StorageError,
    ValidationShareExceeded,
    ValidationUnavailable,
)
from loraplex.adapters.storage.local_store import WEIGHTS_FILE
from loraplex.adapters.versions.pending_folders import PendingFolder, PendingFolders
from loraplex.adapters.versions.version_job import SYSTEM, LifecycleConfig, VersionJob
from loraplex.engine.messages import AdapterKey
from loraplex.tenants.audit_log import AuditRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.models import AdapterVersion
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.versions import PendingVersion, PendingVersions, VersionStates, owners_of
from loraplex.tenants.repetition import repeat
from loraplex.tenants.unit_of_work import UnitOfWork


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """A version in the state `validating` whose transaction is still open. Call `start` after the commit."""

    record: AdapterVersion
    pending: PendingFolder


class VersionLifecycle:
    """Runs one `VersionJob` per uploaded folder. `run` works in the background of a server, `close` ends it."""

    def __init__(
        self,
        database: Database,
        work: VersionJob,
        pending: PendingFolders,
        limits: LifecycleConfig,
        quarantined: Callable[[], Iterable[AdapterKey]] = tuple,
    ) -> None:
        """`quarantined` returns the adapters that an engine refuses now."""
        self._database = database
        self._work = work
        self._folders = pending
        self._limits = limits
        self._quarantined = quarantined
        self._quarantined_before: frozenset[AdapterKey] = frozenset()
        self._tasks: dict[UUID, asyncio.Task[None]] = {}
        self._of_tenant: Counter[UUID] = Counter()
        self._log = structlog.get_logger("loraplex.lifecycle")

    async def register(self, uow: UnitOfWork, tenant_id: UUID, name: str, staged: Path) -> RegisteredVersion:
        """Register a version of `name`; `start` validates it after the commit. `staged` is taken over.

        Raises `AdapterNotFound`, and `ValidationUnavailable` when too many wait.
        """
        self._require_room(tenant_id)
        return await register_folder(uow, tenant_id, self._folders, name, staged)

    def start(self, registered: RegisteredVersion) -> None:
        """Validate the version in the background."""
        self._spawn(PendingVersion(registered.record.tenant_id, registered.record.id), registered.pending)

    async def run(self) -> None:
        """Resume abandoned versions and apply the engines' quarantines until cancelled."""
        async with asyncio.TaskGroup() as rounds:
            rounds.create_task(self._repeat(self._watch_folders, self._limits.sweep_s))
            rounds.create_task(self._repeat(self.apply_quarantines, self._limits.sweep_s))
            rounds.create_task(self._repeat(self.end_stale, self._limits.sweep_s))

    async def _watch_folders(self) -> None:
        with self._folders.watched():
            await self._repeat(self.resume_abandoned, self._limits.resume_s)

    async def _repeat(self, step: Callable[[], Awaitable[None]], seconds: float) -> None:
        await repeat(self._log, step, seconds, retried=(TenantsError, AdaptersError, OSError))

    async def resume_abandoned(self) -> None:
        """Resume unlocked folders, which a command or an ended server has left; delete those without a version."""
        resumed: list[str] = []
        removed: list[str] = []
        for pending in self._folders.abandoned():
            try:
                is_resumed = await self._resume(pending)
            except BaseException:
                pending.unlock()
                raise
            (resumed if is_resumed else removed).append(str(pending.version_id))
        if resumed or removed:
            self._log.info("uploads of ended processes were taken over", resumed=resumed, removed=removed)

    async def end_stale(self) -> None:
        """End versions that are too old and that this process does not validate."""
        async with self._database.as_operator() as session:
            stale = await PendingVersions(session).older_than(2 * self._limits.give_up_s)
        for version in stale:
            if version.version_id not in self._tasks:
                await self._end_without_files(version)

    async def apply_quarantines(self) -> None:
        """Quarantine each adapter that an engine newly refuses; it stays so after that engine has ended."""
        now = frozenset(self._quarantined())
        for namespace, digest in now - self._quarantined_before:
            async with self._database.as_operator() as session:
                owners = await owners_of(session, digest)
            for tenant_id in owners:
                if self._work.namespace_of(tenant_id) == namespace:
                    await self.quarantine(tenant_id, digest, "an engine: its rows were not finite repeatedly")
        self._quarantined_before = now

    async def quarantine(self, tenant_id: UUID, digest: str, reason: str) -> int:
        """Quarantine every serving version of these weights; return how many there were."""
        async with self._database.as_tenant(tenant_id) as session:
            states = VersionStates(session, tenant_id, AuditRepository(session, SYSTEM, tenant_id))
            serving = await AdapterRepository(session, tenant_id).serving(digest)
            for record in serving:
                await states.move(record.id, "quarantined", expected=(record.state,), reason=reason)
        return len(serving)

    async def settled(self) -> None:
        """Return when no background work is left."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def close(self) -> None:
        """Stop the background work; the next process resumes what is unfinished."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _resume(self, pending: PendingFolder) -> bool:
        """Validate the version in the background; return False where it is unknown, and its files are removed."""
        async with self._database.as_operator() as session:
            version = await PendingVersions(session).get(pending.version_id)
        if version is None:
            pending.discard()
            return False
        self._spawn(version, pending)
        return True

    async def _end_without_files(self, version: PendingVersion) -> None:
        """End a version whose uploaded files are gone; while storage is unavailable the next round retries."""
        try:
            await self._work.end_without_files(version)
        except StorageError as error:
            self._log.warning("version not ended", version_id=str(version.version_id), reason=str(error))

    def _require_room(self, tenant_id: UUID) -> None:
        limits = self._limits
        if self._of_tenant[tenant_id] >= limits.max_waiting_per_tenant:
            raise ValidationShareExceeded(
                f"{limits.max_waiting_per_tenant} versions of this tenant wait already"
            )
        if len(self._tasks) >= limits.max_waiting:
            raise ValidationUnavailable(f"{limits.max_waiting} versions wait already")

    def _spawn(self, version: PendingVersion, pending: PendingFolder) -> None:
        task = asyncio.create_task(self._work.run(version, pending))
        self._tasks[version.version_id] = task
        self._of_tenant[version.tenant_id] += 1
        task.add_done_callback(partial(self._forget, version, pending))

    def _forget(self, version: PendingVersion, pending: PendingFolder, task: asyncio.Task[None]) -> None:
        # Unlock here: a task that is cancelled before it begins runs none of its own code.
        pending.unlock()
        del self._tasks[version.version_id]
        self._of_tenant[version.tenant_id] -= 1
        if not self._of_tenant[version.tenant_id]:
            del self._of_tenant[version.tenant_id]
        if not task.cancelled() and task.exception() is not None:
            self._log.error("a version job failed", reason=str(task.exception()))


async def register_folder(
    uow: UnitOfWork,
    tenant_id: UUID,
    folders: PendingFolders,
    name: str,
    staged: Path,
    *,
    is_probed: bool = True,
) -> RegisteredVersion:
    """Register a version of `name` as `validating`. `staged` is taken over, and deleted if `uow` does not commit.

    `is_probed` False is recorded in the audit log. Raises `AdapterNotFound`, `StorageError`.
    """
    version_id = uuid4()
    weights = staged / WEIGHTS_FILE
    size_bytes = weights.stat().st_size if weights.is_file() else 0
    pending = folders.add(staged, version_id)
    uow.on_rollback(pending.discard)
    record = await VersionStates(uow.session, tenant_id, uow.audit).create(
        name, version_id=version_id, size_bytes=size_bytes, created_by=uow.actor.name, is_probed=is_probed
    )
    return RegisteredVersion(record, pending)
