"""All files of a tenant: blobs, and parts of uploads. Invariant: erasing needs no catalogue, so that nothing unknown stays behind."""

import asyncio
from uuid import UUID

from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.uploads.parts import UploadParts


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
