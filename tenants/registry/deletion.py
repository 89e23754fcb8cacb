"""Deletes adapters and versions, unless aliases or running requests use them; files are removed later, when no request reads them.

Invariant: a deleted version stays as a row in the state `deleting`, for the ledger; its number is never used again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import Select, case, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import InUse
from loraplex.tenants.models import Adapter, AdapterVersion, ReservationRow
from loraplex.tenants.registry.adapters import AdapterRepository, present, require_revision
from loraplex.tenants.registry.aliases import AliasRepository

DELETING: Final = "deleting"
UNVALIDATED: Final = ("uploading", "validating")
FILELESS: Final = ("rejected", DELETING)
WITHOUT_FILES: Final = func.coalesce(
    AdapterVersion.blob_deleted_at, case((AdapterVersion.digest.is_(None), func.now()))
)
"""Versions in these states have no stored files to remove later."""
DELETED: Final = (
    select(AdapterVersion.tenant_id, AdapterVersion.digest)
    .where(AdapterVersion.state == DELETING, AdapterVersion.blob_deleted_at.is_(None))
    .where(AdapterVersion.digest.is_not(None))
    .distinct()
)
LOCK_DIGEST: Final = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")


class AdapterDeletion:
    """Deletes adapters and versions of a tenant in one session."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id
        self._adapters = AdapterRepository(session, tenant_id)

    async def delete_version(
        self, name: str, version: int, seen: int | None = None, *, forced: bool = False
    ) -> AdapterVersion:
        """Delete a version; may be repeated. `seen` is its revision, None for any.

        Raises `AdapterNotFound`, `VersionNotFound`, `RevisionMoved`, or `InUse` while it is being validated, an alias
        points to it, or, unless `forced`, requests run on it.
        """
        adapter = await self._adapters.locked(name)
        record = await self._adapters.version_of(adapter, version)
        require_revision(record, seen)
        if record.state == DELETING:
            return record
        if aliases := await AliasRepository(self._session, self._tenant_id).pointing_to(adapter, version):
            raise InUse(f"these aliases point to version {version}: {', '.join(aliases)}; move them first")
        await self._require_idle(adapter, [record], forced=forced)
        record.state = DELETING
        record.blob_deleted_at = datetime.now(UTC) if record.digest is None else None
        await self._session.flush()
        return record

    async def delete_adapter(self, name: str, seen: int | None = None) -> Adapter:
        """Delete an adapter and all its versions; its name is free. `seen` is its revision, None for any.

        Raises `AdapterNotFound`, `RevisionMoved`, or `InUse` while it has an alias, a version is being validated, or
        requests run on one.
        """
        adapter = await self._adapters.locked(name)
        require_revision(adapter, seen)
        aliases = await AliasRepository(self._session, self._tenant_id).list(name)
        if aliases:
            names = ", ".join(state.alias for state in aliases)
            raise InUse(f"adapter {name} has these aliases: {names}; delete them first")
        await self._require_idle(adapter, (await self._session.scalars(present(adapter))).all())
        return await self._remove(adapter)

    async def remove_adapter(self, name: str) -> Adapter:
        """Delete an adapter for an operator, even while aliases or requests use it. Raises `AdapterNotFound`."""
        return await self._remove(await self._adapters.locked(name))

    async def _remove(self, adapter: Adapter) -> Adapter:
        adapter.deleted_at = datetime.now(UTC)
        await self._session.flush()
        own = (AdapterVersion.tenant_id == self._tenant_id, AdapterVersion.adapter_id == adapter.id)
        await self._session.execute(
            update(AdapterVersion).where(*own).values(state=DELETING, blob_deleted_at=WITHOUT_FILES)
        )
        return adapter

    async def _require_idle(
        self, adapter: Adapter, versions: Sequence[AdapterVersion], *, forced: bool = False
    ) -> None:
        for version in versions:
            if version.state in UNVALIDATED:
                raise InUse(
                    f"version {version.version} of adapter {adapter.name} is being validated; try later"
                )
        digests = {version.digest for version in versions if version.digest is not None}
        running = 0 if forced else await self._running(adapter, digests)
        if running:
            raise InUse(f"{running} requests run on adapter {adapter.name} with these weights; try later")

    async def _running(self, adapter: Adapter, digests: Iterable[str]) -> int:
        query = select(func.count()).where(
            ReservationRow.tenant_id == self._tenant_id,
            ReservationRow.adapter_id == adapter.id,
            ReservationRow.digest.in_(digests),
        )
        return await self._session.scalar(query) or 0


Fate: TypeAlias = Literal["unused", "shared", "running"]
"""The files may be removed; another version of the tenant needs them; or requests still read them."""


@dataclass(frozen=True, slots=True)
class Blob:
    """The files of one digest of one tenant, which several versions may share."""

    tenant_id: UUID
    digest: str


class UnusedBlobs:
    """Blobs whose versions are deleted, of all tenants: for an operator's session."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def list(self, limit: int) -> set[Blob]:
        """At most `limit` blobs of deleted versions; `claim` decides about each."""
        return await self._blobs(DELETED.limit(limit))

    async def of_adapter(self, adapter_id: UUID) -> set[Blob]:
        """The blobs of the adapter's deleted versions."""
        return await self._blobs(DELETED.where(AdapterVersion.adapter_id == adapter_id))

    async def _blobs(self, query: Select[UUID, str | None]) -> set[Blob]:
        rows = await self._session.execute(query)
        return {Blob(tenant_id, digest) for tenant_id, digest in rows if digest is not None}

    async def claim(self, blob: Blob) -> Fate:
        """Decide about the blob, locked so that it is not stored again until the transaction ends."""
        await lock_digest(self._session, blob)
        needed = select(func.count()).where(
            AdapterVersion.tenant_id == blob.tenant_id,
            AdapterVersion.digest == blob.digest,
            AdapterVersion.state.not_in(FILELESS),
        )
        if await self._session.scalar(needed):
            return "shared"
        running = select(func.count()).where(
            ReservationRow.tenant_id == blob.tenant_id, ReservationRow.digest == blob.digest
        )
        return "running" if await self._session.scalar(running) else "unused"

    async def mark_deleted(self, blob: Blob) -> None:
        """Record that the files are gone: the deleted versions no longer exist for their tenant."""
        deleted_versions = (
            AdapterVersion.tenant_id == blob.tenant_id,
            AdapterVersion.digest == blob.digest,
            AdapterVersion.state == DELETING,
        )
        await self._session.execute(
            update(AdapterVersion).where(*deleted_versions).values(blob_deleted_at=datetime.now(UTC))
        )


async def lock_digest(session: AsyncSession, blob: Blob) -> None:
    """Lock a blob. Storing one takes this lock and writes the digest into a version before the files.

    A removal therefore either has ended before, or sees the version and keeps the files.
    """
    name = f"blob:{blob.tenant_id}:{blob.digest}"
    await session.execute(LOCK_DIGEST, {"name": name})
