"""The stored files of deleted versions: they are removed when no other version needs them, and no request reads them."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import Select, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import lock
from loraplex.tenants.models import AdapterVersion, ReservationRow

DELETING: Final = "deleting"
FILELESS: Final = ("rejected", DELETING)
DELETED: Final = (
    select(AdapterVersion.tenant_id, AdapterVersion.digest)
    .where(AdapterVersion.state == DELETING, AdapterVersion.blob_deleted_at.is_(None))
    .where(AdapterVersion.digest.is_not(None))
    .distinct()
)


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
    await lock(session, f"blob:{blob.tenant_id}:{blob.digest}")
