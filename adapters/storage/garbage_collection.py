"""Deletes the files of removed adapters once no version of the tenant and no running request uses them.

Invariant: files are deleted in a transaction that blocks storing the same ones, and never in the round that first
found them removed: by the next round, a request that had resolved its version before has its reservation.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias
from uuid import UUID

import structlog

from loraplex.adapters.errors import StorageError
from loraplex.tenants.admission.fences import ship_everywhere
from loraplex.tenants.database import Database
from loraplex.tenants.errors import StoreUnavailable
from loraplex.tenants.registry.unused_blobs import Blob, UnusedBlobs

LOG = structlog.get_logger("loraplex.adapters")
ROUND_S: Final = 10.0
MAX_AT_ONCE: Final = 1000

RemoveBlob: TypeAlias = Callable[[UUID, str], Awaitable[None]]
"""Removes the files of (tenant, digest); harmless where there are none."""


class BlobGarbageCollector:
    """Runs rounds in one process; several processes may, since a blob's lock allows one removal at a time."""

    def __init__(self, database: Database, remove: RemoveBlob, round_s: float = ROUND_S) -> None:
        self._database = database
        self._remove = remove
        self._round_s = round_s
        self._seen: set[Blob] = set()

    async def run(self) -> None:
        """Run rounds until cancelled. Failures are retried in the next round."""
        while True:
            try:
                await self.sweep()
            except (StoreUnavailable, StorageError, OSError) as error:
                LOG.warning("files of deleted adapters were not removed", reason=str(error))
            except Exception:
                # Logged; one unexpected error must not keep deleted files for ever.
                LOG.exception("removing files of deleted adapters failed")
            await asyncio.sleep(self._round_s)

    async def sweep(self) -> int:
        """Run one round; return how many blobs were removed."""
        async with self._database.as_operator() as session:
            found = await UnusedBlobs(session).list(MAX_AT_ONCE)
        ripe, self._seen = found & self._seen, found
        for tenant_id in {blob.tenant_id for blob in ripe}:
            await ship_everywhere(self._database, tenant_id)
        return sum([await remove_unused(self._database, self._remove, blob) for blob in ripe])


async def remove_unused(database: Database, remove: RemoveBlob, blob: Blob) -> bool:
    """Delete the files unless they are in use; return whether it did. Raises what `remove` does."""
    async with database.as_operator() as session:
        blobs = UnusedBlobs(session)
        outcome = await blobs.claim(blob)
        if outcome == "running":
            return False
        if outcome == "unused":
            await remove(blob.tenant_id, blob.digest)
        await blobs.mark_deleted(blob)
        return outcome == "unused"


async def remove_files_of(database: Database, remove: RemoveBlob, adapter_id: UUID) -> None:
    """Delete the files of an adapter's deleted versions that nothing else uses, where no server runs that does it later."""
    async with database.as_operator() as session:
        blobs = await UnusedBlobs(session).of_adapter(adapter_id)
    for blob in blobs:
        await remove_unused(database, remove, blob)
