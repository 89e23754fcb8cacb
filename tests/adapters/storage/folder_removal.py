"""The removal of blobs from one folder, where the product removes them from every machine."""

import asyncio
from uuid import UUID

from loraplex.adapters.storage.garbage_collection import RemoveBlob
from loraplex.adapters.storage.local_store import LocalAdapterStore


def remove_from(storage: LocalAdapterStore) -> RemoveBlob:
    """Return a removal from the folder of `storage`."""

    async def remove(tenant_id: UUID, digest: str) -> None:
        if storage.exists(tenant_id, digest):
            await asyncio.to_thread(storage.delete, tenant_id, digest)

    return remove
