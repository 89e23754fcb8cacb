"""Erases what is left of a deleted tenant: running requests, cached blocks, blobs, uploads, rows and counters.

Invariant: every step may be repeated, and the tenant counts as erased only after all of them: another gateway continues where
one died. Files are erased by folder, without a list of them, so that nothing unknown remains.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.uploads.parts import UploadParts
from loraplex.engine.client import EngineClient
from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.database import Database
from loraplex.tenants.valkey import Valkey, erase_tenant


class StoredFiles:
    """The files of all tenants."""

    def __init__(self, blobs: BlobStore, parts: UploadParts) -> None:
        self._blobs = blobs
        self._parts = parts

    async def tenants(self) -> list[UUID]:
        """Whose blobs are on this machine, or were."""
        return await asyncio.to_thread(self._blobs.storage.tenants)

    async def erase(self, tenant_id: UUID) -> None:
        """Removes all files of a tenant; harmless when there are none. Raises `BlobStoreUnavailable`."""
        await self._parts.delete_tenant(tenant_id)
        await self._blobs.delete_tenant(tenant_id)


ROWS_PER_TRANSACTION: Final = 1000
POLL_S: Final = 0.1


class TenantFiles(Protocol):
    """Where tenants' blobs and uploads are."""

    async def tenants(self) -> list[UUID]:
        """Whose blobs are on this machine, or were."""
        ...

    async def erase(self, tenant_id: UUID) -> None:
        """Removes all of them, also those that nobody knows; harmless when repeated. Raises `AdaptersError`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantErasure:
    """`settle_s`: how long the tenant's requests, which have failed by then, are given to be settled."""

    database: Database
    valkey: Valkey
    engine: EngineClient
    namespace_of: Callable[[UUID], bytes]
    files: TenantFiles
    settle_s: float = 10.0

    async def erase(self, tenant_id: UUID) -> bool:
        """Whether nothing is left. Raises `StoreUnavailable`, `EngineUnavailable`, `AdaptersError`: to be tried again."""
        await self.forget(tenant_id)
        await self._until_settled(tenant_id)
        await self.files.erase(tenant_id)
        while not await self._erase_rows(tenant_id):
            await asyncio.sleep(0)
        # Again, for what its last requests still held.
        await self.forget(tenant_id)
        await erase_tenant(self.valkey, tenant_id)
        async with self.database.as_operator() as session:
            return await TenantDeletions(session).finish(tenant_id)

    async def forget(self, tenant_id: UUID) -> None:
        """Ends the tenant's requests in this gateway's engines, whichever gateway began them, and drops its blocks."""
        await self.engine.forget(self.namespace_of(tenant_id))

    async def _until_settled(self, tenant_id: UUID) -> None:
        """What a dead gateway has left open is nobody's to settle: it is waited for no longer than `settle_s`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.settle_s
        while loop.time() < end:
            async with self.database.as_operator() as session:
                if not await TenantDeletions(session).open_requests(tenant_id):
                    return
            await asyncio.sleep(POLL_S)

    async def _erase_rows(self, tenant_id: UUID) -> bool:
        async with self.database.as_operator() as session:
            return await TenantDeletions(session).erase_rows(tenant_id, ROWS_PER_TRANSACTION)
