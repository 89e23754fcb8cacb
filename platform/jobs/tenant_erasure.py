"""Erases the data of a deleted tenant: running requests, cached blocks, blobs, uploads, rows and counters.

Invariant: every step may be repeated, and the tenant counts as erased only after all of them, so another gateway can continue.
Files are erased by folder, without a list of them, so that no unknown file remains.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from redis.asyncio import Redis

from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.uploads.parts import UploadParts
from loraplex.engine.client import EngineClient
from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.admission.fences import ship_everywhere
from loraplex.tenants.database import Database
from loraplex.tenants.valkey import erase_tenant

ROWS_PER_TRANSACTION: Final = 1000
POLL_S: Final = 0.1


class StoredFiles:
    """The files of all tenants: adapters and parts of uploads."""

    def __init__(self, blobs: BlobStore, parts: UploadParts) -> None:
        self._blobs = blobs
        self._parts = parts

    async def tenants(self) -> list[UUID]:
        """List the tenants that have or had blobs on this machine."""
        return await asyncio.to_thread(self._blobs.storage.tenants)

    async def erase(self, tenant_id: UUID) -> None:
        """Remove all files of a tenant, unlisted ones too; may be repeated. Raises `BlobStoreUnavailable`."""
        await self._parts.delete_tenant(tenant_id)
        await self._blobs.delete_tenant(tenant_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantErasure:
    """Erasure of deleted tenants. `settle_s`: longest wait until the tenant's failed requests are settled."""

    database: Database
    valkey: Redis
    engine: EngineClient
    namespace_of: Callable[[UUID], bytes]
    files: StoredFiles
    settle_s: float = 10.0

    async def erase(self, tenant_id: UUID) -> bool:
        """Erase a tenant. True if nothing is left. After `StoreUnavailable`, `EngineUnavailable` or `AdaptersError`, call again."""
        await self.forget(tenant_id)
        await self._until_settled(tenant_id)
        await self.files.erase(tenant_id)
        while not await self._erase_rows(tenant_id):
            await asyncio.sleep(0)
        # Again, because its last requests may have cached blocks since.
        await self.forget(tenant_id)
        await erase_tenant(self.valkey, tenant_id)
        async with self.database.as_operator() as session:
            return await TenantDeletions(session).finish(tenant_id)

    async def forget(self, tenant_id: UUID) -> None:
        """End the tenant's requests in this gateway's engines, whichever gateway started them, and drop its cached blocks."""
        await self.engine.forget(self.namespace_of(tenant_id))

    async def _until_settled(self, tenant_id: UUID) -> None:
        """Wait for the settlement of open requests, at most `settle_s`: no gateway settles those of a dead gateway. They are
        known once every gateway has shipped its journal.
        """
        await ship_everywhere(self.database, tenant_id)
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
