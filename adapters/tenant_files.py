"""All files of a tenant: blobs on this machine. Invariant: erasing needs no catalogue, so that nothing unknown stays behind."""

import asyncio
from uuid import UUID

from loraplex.adapters.storage import AdapterStorage


class StoredFiles:
    """The files of all tenants."""

    def __init__(self, storage: AdapterStorage) -> None:
        self._storage = storage

    async def tenants(self) -> list[UUID]:
        """Whose blobs are on this machine, or were."""
        return await asyncio.to_thread(self._storage.tenants)

    async def erase(self, tenant_id: UUID) -> None:
        """Removes all files of a tenant; harmless when there are none."""
        await asyncio.to_thread(self._storage.delete_tenant, tenant_id)
