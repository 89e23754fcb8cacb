"""Removes the files of deleted adapters, once nobody reads them: no version of the tenant holds them, no request runs on them.

Invariant: files go only in a transaction that keeps others from storing the same ones, and never in the round that first
saw them deleted: a request that had resolved its version just before has its reservation by the next.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias
from uuid import UUID

import structlog

from loraplex.adapters.errors import StorageError
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.tenants.database import Database
from loraplex.tenants.errors import StoreUnavailable
from loraplex.tenants.registry.deletion import Blob, UnusedBlobs

LOG = structlog.get_logger("loraplex.adapters")
ROUND_S: Final = 10.0
MAX_AT_ONCE: Final = 1000

RemoveBlob: TypeAlias = Callable[[UUID, str], Awaitable[None]]
"""Removes the files of (tenant, digest); harmless where there are none."""


class BlobGarbageCollector:
    """Goes round in one process; several may run, the lock of a blob lets one at a time remove it."""

    def __init__(self, database: Database, remove: RemoveBlob, round_s: float = ROUND_S) -> None:
        self._database = database
        self._remove = remove
        self._round_s = round_s
        self._seen: set[Blob] = set()

    async def run(self) -> None:
        """Until cancelled. What fails is tried again in the next round."""
        while True:
            try:
                await self.sweep()
            except (StoreUnavailable, StorageError, OSError) as error:
                LOG.warning("files of deleted adapters were not removed", reason=str(error))
            except Exception:
                # Reported; a defect met once must not keep deleted files for ever.
                LOG.exception("removing files of deleted adapters failed")
            await asyncio.sleep(self._round_s)

    async def sweep(self) -> int:
        """One round: how many blobs were removed."""
        async with self._database.as_operator() as session:
            found = await UnusedBlobs(session).list(MAX_AT_ONCE)
        ripe, self._seen = found & self._seen, found
        return sum([await remove_unused(self._database, self._remove, blob) for blob in ripe])


async def remove_unused(database: Database, remove: RemoveBlob, blob: Blob) -> bool:
    """Removes the files unless they are needed: whether it did. Raises what `remove` does."""
    async with database.as_operator() as session:
        blobs = UnusedBlobs(session)
        outcome = await blobs.claim(blob)
        if outcome == "running":
            return False
        if outcome == "unused":
            await remove(blob.tenant_id, blob.digest)
        await blobs.mark_deleted(blob)
        return outcome == "unused"


def remove_from(storage: LocalAdapterStore) -> RemoveBlob:
    """Removal from one folder."""

    async def remove(tenant_id: UUID, digest: str) -> None:
        if storage.exists(tenant_id, digest):
            await asyncio.to_thread(storage.delete, tenant_id, digest)

    return remove
