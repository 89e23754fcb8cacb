"""Deleting adapters and versions: refused while an alias points or requests run; the files go later, when nobody reads them.

Invariant: a deleted version stays as a row in the state `deleting`, for the ledger; its number is never given again.
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
"""What was never validated has no files that could be removed later."""
DELETED: Final = (
    select(AdapterVersion.tenant_id, AdapterVersion.digest)
    .where(AdapterVersion.state == DELETING, AdapterVersion.blob_deleted_at.is_(None))
    .where(AdapterVersion.digest.is_not(None))
    .distinct()
)
LOCK_DIGEST: Final = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")


class AdapterDeletion:
    """Deletes what is a tenant's, seen by one session."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id
        self._adapters = AdapterRepository(session, tenant_id)

    async def delete_version(self, name: str, version: int, seen: int | None = None) -> AdapterVersion:
        """Deleting it again changes nothing; `seen` is its revision, None whatever it is.

        Raises `AdapterNotFound`, `VersionNotFound`, `RevisionMoved`, or `InUse` while it is being judged, an alias points
        to it, or requests run on it.
        """
        adapter = await self._adapters.locked(name)
        record = await self._adapters.version_of(adapter, version)
        if seen is not None:
            require_revision(record, seen)
        if record.state == DELETING:
            return record
        if aliases := await AliasRepository(self._session, self._tenant_id).pointing_to(adapter, version):
            raise InUse(f"these aliases point to version {version}: {', '.join(aliases)}; move them first")
        await self._require_idle(adapter, [record])
        record.state = DELETING
        record.blob_deleted_at = datetime.now(UTC) if record.digest is None else None
        await self._session.flush()
        return record

    async def delete_adapter(self, name: str, seen: int | None = None) -> Adapter:
        """Frees the name; every version is deleted. `seen` is its revision, None whatever it is.

        Raises `AdapterNotFound`, `RevisionMoved`, or `InUse` while it has an alias, a version is being judged, or requests
        run on one.
        """
        adapter = await self._adapters.locked(name)
        if seen is not None:
            require_revision(adapter, seen)
        aliases = await AliasRepository(self._session, self._tenant_id).list(name)
        if aliases:
            names = ", ".join(state.alias for state in aliases)
            raise InUse(f"adapter {name} has these aliases: {names}; delete them first")
        await self._require_idle(adapter, (await self._session.scalars(present(adapter))).all())
        return await self._remove(adapter)

    async def remove_adapter(self, name: str) -> Adapter:
        """The same for an operator, whatever points to it or runs on it. Raises `AdapterNotFound`."""
        return await self._remove(await self._adapters.locked(name))

    async def _remove(self, adapter: Adapter) -> Adapter:
        adapter.deleted_at = datetime.now(UTC)
        await self._session.flush()
        own = (AdapterVersion.tenant_id == self._tenant_id, AdapterVersion.adapter_id == adapter.id)
        await self._session.execute(
            update(AdapterVersion).where(*own).values(state=DELETING, blob_deleted_at=WITHOUT_FILES)
        )
        return adapter

    async def _require_idle(self, adapter: Adapter, versions: Sequence[AdapterVersion]) -> None:
        for version in versions:
            if version.state in UNVALIDATED:
                raise InUse(
                    f"version {version.version} of adapter {adapter.name} is being validated; try later"
                )
        digests = {version.digest for version in versions if version.digest is not None}
        running = await self._running(adapter, digests)
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
"""The files may go; another version of the tenant holds them; or requests still read them."""


@dataclass(frozen=True, slots=True)
class Blob:
    """The files of one digest of one tenant, whichever versions hold them."""

    tenant_id: UUID
    digest: str


class UnusedBlobs:
    """Blobs whose versions are deleted, of all tenants: for an operator's session."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def list(self, limit: int) -> set[Blob]:
        """At most `limit` blobs that a deleted version holds; `claim` tells what may become of them."""
        return await self._blobs(DELETED.limit(limit))

    async def of_adapter(self, adapter: Adapter) -> set[Blob]:
        """Those that a deleted version of the adapter holds."""
        return await self._blobs(DELETED.where(AdapterVersion.adapter_id == adapter.id))

    async def _blobs(self, query: Select[UUID, str | None]) -> set[Blob]:
        rows = await self._session.execute(query)
        return {Blob(tenant_id, digest) for tenant_id, digest in rows if digest is not None}

    async def claim(self, blob: Blob) -> Fate:
        """What is to become of the blob; until the transaction ends nobody stores it anew."""
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
        """From now on its deleted versions do not exist for their tenant."""
        held = (
            AdapterVersion.tenant_id == blob.tenant_id,
            AdapterVersion.digest == blob.digest,
            AdapterVersion.state == DELETING,
        )
        await self._session.execute(
            update(AdapterVersion).where(*held).values(blob_deleted_at=datetime.now(UTC))
        )


async def lock_digest(session: AsyncSession, blob: Blob) -> None:
    """Who stores a blob takes this lock, and under it writes the digest into a version, before the files are put.

    Then a removal either comes before and is over, or sees the version and lets the files be.
    """
    name = f"blob:{blob.tenant_id}:{blob.digest}"
    await session.execute(LOCK_DIGEST, {"name": name})
