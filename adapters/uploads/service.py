"""Resumable uploads: receives parts, assembles and verifies them, and registers the version.

Invariant: a version is registered only with files of the declared sizes and hashes; an earlier failure registers
nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from copy import copy
from datetime import timedelta
from pathlib import Path
from typing import Self, TypeAlias
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.adapters.errors import BlobStoreUnavailable, PartRefused, StorageError, UploadTooLarge
from loraplex.adapters.limits import DEFAULT_LIMITS, AdapterLimits, UploadConfig
from loraplex.adapters.storage.free_space import DiskSpace, disk_space, require_free
from loraplex.adapters.storage.local_store import (
    LocalAdapterStore,
    max_file_bytes,
    remove_staged,
)
from loraplex.adapters.storage.threads import on_thread
from loraplex.adapters.uploads.lease import UploadLease
from loraplex.adapters.uploads.parts import StoredPart, UploadParts, part_size, require_all
from loraplex.adapters.versions.lifecycle import VersionLifecycle
from loraplex.tenants.actors import Actor
from loraplex.tenants.audit_log import author_behind
from loraplex.tenants.database import Database
from loraplex.tenants.models import AdapterVersion, Upload, UploadPart
from loraplex.tenants.registry.records import AcceptedVersion
from loraplex.tenants.registry.uploads import (
    COMPLETED,
    DeclaredFile,
    UploadRepository,
    UploadTerms,
    require_same,
)
from loraplex.tenants.unit_of_work import unit_of_work

Turn: TypeAlias = Callable[[UUID], AbstractAsyncContextManager[None]]
Receive: TypeAlias = Callable[[Path], Awaitable[Sequence[DeclaredFile]]]
"""Writes the files of a whole adapter to a staged folder, and returns them."""
LOG = structlog.get_logger("loraplex.uploads")


def _at_once(_: UUID) -> AbstractAsyncContextManager[None]:
    return nullcontext()


class Uploads:
    """The uploads of all tenants on one gateway."""

    def __init__(
        self,
        database: Database,
        parts: UploadParts,
        storage: LocalAdapterStore,
        lifecycle: VersionLifecycle,
        limits: UploadConfig,
        adapter_limits: AdapterLimits = DEFAULT_LIMITS,
    ) -> None:
        self.limits = limits
        self.adapter_limits = adapter_limits
        self.storage = storage
        self._database = database
        self._parts = parts
        self._lifecycle = lifecycle
        self._lease_duration = timedelta(seconds=limits.lease_s)
        self._turn: Turn = _at_once

    def in_turns(self, turn: Turn) -> Self:
        """Return the same uploads, but each transaction of a tenant's request waits for `turn`."""
        uploads = copy(self)
        uploads._turn = turn
        return uploads

    @property
    def terms(self) -> UploadTerms:
        """The terms of a new upload."""
        return UploadTerms(
            self.limits.part_bytes, timedelta(seconds=self.limits.expiry_s), self.limits.max_open
        )

    @property
    def max_bytes(self) -> int:
        """The most that the two files of an adapter of this model may have, in bytes."""
        return sum(max_file_bytes(self.adapter_limits).values())

    def require_possible(self, files: Sequence[DeclaredFile]) -> None:
        """Raise `UploadTooLarge` for a file larger than that of any adapter of this model."""
        max_bytes = max_file_bytes(self.adapter_limits)
        for file in files:
            if file.size > max_bytes[file.name]:
                raise UploadTooLarge(
                    file.name, f"has {file.size} bytes; at most {max_bytes[file.name]} fit this model"
                )

    async def require_space(self) -> None:
        """Raise `StorageFull` while the disk has no more free space than its floor."""
        await on_thread(require_free, self.storage.root.parent, self.limits.storage_floor_bytes)

    async def disk_space(self) -> DiskSpace:
        """Return the space of the file system that receives uploads. Raises `BlobStoreUnavailable`."""
        return await on_thread(disk_space, self.storage.root.parent)

    async def require_store(self) -> None:
        """Raise `BlobStoreUnavailable` unless the folder or the bucket of blobs answers; a bucket is tried for a minute."""
        await self._parts.require_store()

    async def expected_size(self, tenant_id: UUID, upload_id: UUID, file: str, number: int) -> int:
        """Return the size in bytes of this part of an open upload.

        Raises `UploadNotFound`, `UploadEnded`, `UploadClaimed`, `PartRefused`, `UploadTooLarge`.
        """
        async with self._as_tenant(tenant_id) as session:
            upload = await UploadRepository(session, tenant_id).require_open(upload_id)
        declared = _declared(upload, file)
        self.require_possible([declared])
        return part_size(declared, number, upload.part_size)

    async def receive_part(
        self,
        tenant_id: UUID,
        upload_id: UUID,
        file: str,
        number: int,
        chunks: AsyncIterator[bytes],
        *,
        size: int,
        sha256: str | None,
    ) -> StoredPart:
        """Store and record a part of `size` bytes in place of an earlier one of its number.

        Raises `UploadRefused`, `BlobStoreUnavailable`, `StorageFull`, what `expected_size` does and what `chunks`
        raises.
        """
        stored = await self._parts.receive(tenant_id, upload_id, chunks, name=file, size=size, sha256=sha256)
        unused: UUID | None = stored.object_id
        try:
            async with self._as_tenant(tenant_id) as session:
                replaced = await UploadRepository(session, tenant_id).record_part(
                    upload_id, file, number, size_bytes=size, sha256=stored.sha256, object_id=stored.object_id
                )
            unused = replaced
        finally:
            if unused is not None:
                await self._best_effort(self._parts.delete(tenant_id, upload_id, unused))
        return stored

    async def complete(self, tenant_id: UUID, upload_id: UUID, actor: Actor) -> AcceptedVersion:
        """Assemble the parts; return the version that the upload becomes, or became before. Its parts stay on failure.

        Raises `PartsMissing`, `ChecksumMismatch`, `UploadNotFound`, `UploadEnded`, `UploadClaimed`,
        `BlobStoreUnavailable`, `StorageFull`, `DatabaseUnavailable`.
        """
        async with self._as_tenant(tenant_id) as session:
            uploads, began = UploadRepository(session, tenant_id), _now()
            upload = await uploads.claim(upload_id, self._lease_duration)
            name, parts = await uploads.adapter_name(upload), await uploads.parts(upload_id)
            if upload.state == COMPLETED:
                return _accepted(name, await uploads.made_version(upload))
        lease = self._lease_of(upload, began)
        staged = await on_thread(self.storage.make_staged)
        try:
            async with lease.renewed():
                await self._assemble(upload, parts, staged)
                version = await self._begin(upload, name, staged, actor, lease)
        except BaseException:
            await asyncio.shield(self._give_up(upload, staged, lease, end=False))
            raise
        await self.discard(tenant_id, upload_id)
        return version

    async def submit(
        self,
        tenant_id: UUID,
        name: str,
        receive: Receive,
        *,
        size_bytes: int,
        actor: Actor,
        upload_id: UUID,
    ) -> AcceptedVersion:
        """Return the version of a whole adapter, whose files `receive` writes after `size_bytes` are reserved for them.

        The same `upload_id` with the same files gives the same version. Raises what `UploadRepository.reserve_whole`,
        `UploadRepository.declare` and `receive` do, `StorageFull`.
        """
        await self.require_space()
        async with self._as_tenant(tenant_id) as session:
            uploads, began = UploadRepository(session, tenant_id), _now()
            author = (await author_behind(session, actor)).name
            upload = await uploads.reserve_whole(
                name, size_bytes, self.terms, author, upload_id=upload_id, lease=self._lease_duration
            )
            known = await uploads.made_version(upload) if upload.state == COMPLETED else None
        if known is not None:
            await self._compare(upload, receive)
            return _accepted(name, known)
        lease = self._lease_of(upload, began)
        staged: Path | None = None
        try:
            async with lease.renewed():
                staged = await on_thread(self.storage.make_staged)
                files = await receive(staged)
                async with self._as_tenant(tenant_id) as session:
                    await UploadRepository(session, tenant_id).declare(upload.id, files, lease.ends)
                return await self._begin(upload, name, staged, actor, lease)
        except BaseException:
            await asyncio.shield(self._give_up(upload, staged, lease, end=True))
            raise

    async def _compare(self, upload: Upload, receive: Receive) -> None:
        """Receive the body that repeats a completed upload. Raises `IdempotencyMismatch` for other files."""
        staged = await on_thread(self.storage.make_staged)
        try:
            require_same(upload, await receive(staged))
        finally:
            await asyncio.shield(on_thread(remove_staged, staged))

    async def discard(self, tenant_id: UUID, upload_id: UUID) -> None:
        """Delete the parts of an ended upload; what fails now, `UploadCleanup` deletes later."""
        await self._best_effort(self._parts.delete_upload(tenant_id, upload_id))

    @asynccontextmanager
    async def _as_tenant(self, tenant_id: UUID) -> AsyncIterator[AsyncSession]:
        async with self._turn(tenant_id), self._database.as_tenant(tenant_id) as session:
            yield session

    async def _assemble(self, upload: Upload, parts: Sequence[UploadPart], staged: Path) -> None:
        declared = _files(upload)
        received = {file.name: {part.number for part in parts if part.file == file.name} for file in declared}
        require_all(declared, upload.part_size, received)
        try:
            async with asyncio.timeout(self.limits.completion_s):
                for file in declared:
                    objects = [part.object_id for part in parts if part.file == file.name]
                    await self._parts.assemble(upload.tenant_id, upload.id, file, objects, staged / file.name)
        except TimeoutError as error:
            raise BlobStoreUnavailable("assembling the parts took too long") from error

    def _lease_of(self, upload: Upload, began: float) -> UploadLease:
        return UploadLease(self._database, upload, self.limits.lease_s, began)

    async def _begin(
        self, upload: Upload, name: str, staged: Path, actor: Actor, lease: UploadLease
    ) -> AcceptedVersion:
        """Register the version and end the upload in one unit of work: no upload becomes two versions."""
        tenant_id = upload.tenant_id
        # No gateway is notified: none has cached anything of a version that is not ready.
        async with self._turn(tenant_id), unit_of_work(self._database, actor, tenant_id, None) as uow:
            registered = await self._lifecycle.register(uow, tenant_id, name, staged)
            await UploadRepository(uow.session, tenant_id).complete(upload.id, registered.record, lease.ends)
        self._lifecycle.start(registered)
        return _accepted(name, registered.record)

    async def _give_up(self, upload: Upload, staged: Path | None, lease: UploadLease, *, end: bool) -> None:
        if staged is not None:
            await on_thread(remove_staged, staged)
        async with self._database.as_tenant(upload.tenant_id) as session:
            uploads = UploadRepository(session, upload.tenant_id)
            if await uploads.release(upload.id, lease.ends) and end:
                await uploads.abort(upload.id)

    async def _best_effort(self, removal: Awaitable[None]) -> None:
        try:
            await removal
        except StorageError as error:
            LOG.warning("parts are left for the cleanup", reason=str(error))


def _accepted(name: str, version: AdapterVersion) -> AcceptedVersion:
    return AcceptedVersion(name=name, version=version.version, digest=version.digest, state=version.state)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _files(upload: Upload) -> list[DeclaredFile]:
    return [DeclaredFile(**file) for file in upload.files]


def _declared(upload: Upload, name: str) -> DeclaredFile:
    for file in _files(upload):
        if file.name == name:
            return file
    raise PartRefused(
        name[:80], f"is no file of this upload: {', '.join(file.name for file in _files(upload))}"
    )
