"""An adapter's files on the machine of a replica: fetched from the configured storage by tenant and digest.

Invariant: no path of another machine is used, and the engine reads only files whose content has the digest.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

from msgspec.structs import replace

from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE
from loraplex.engine.errors import AdapterLoadFailed
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.platform.datastores.adapter_storage import AdapterStorage
from loraplex.platform.ray.messages import ProbeCall, Submission


class AdapterFiles:
    """The storage of a replica: the shared folder, or a bucket with copies in its data directory."""

    def __init__(self, storage: AdapterStorage) -> None:
        self._storage = storage

    async def localize(self, submission: Submission) -> EngineRequest:
        """The request with its adapter's path on this machine. Raises `StorageError`, `AdapterLoadFailed`."""
        adapter = submission.request.adapter
        if adapter is None:
            return submission.request
        return replace(submission.request, adapter=await self._stored(adapter, submission.tenant_id))

    @asynccontextmanager
    async def probed(self, call: ProbeCall, weights: bytes | None) -> AsyncIterator[AdapterRef]:
        """The adapter to probe, with its path on this machine while the context lasts. Raises as `localize` does."""
        if call.config is None or weights is None:
            yield await self._stored(call.adapter, call.tenant_id)
            return
        with self._storage.local.staging() as folder:
            await asyncio.to_thread(_write, folder, call.config, weights)
            yield replace(call.adapter, blob_path=str(folder))

    async def run_eviction(self) -> None:
        """Keep the copies of adapters within their bound, until cancelled."""
        await self._storage.adapters.run_eviction()

    async def _stored(self, adapter: AdapterRef, tenant_id: UUID | None) -> AdapterRef:
        if tenant_id is None:
            raise AdapterLoadFailed(f"adapter {adapter.digest} is not in the storage")
        folder = await self._storage.adapters.ensure_local(tenant_id, adapter.digest)
        return replace(adapter, blob_path=str(folder))


def read_files(folder: Path) -> tuple[bytes, bytes]:
    """The configuration and the weights of an adapter that is not stored yet. Raises `OSError`."""
    return (folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes()


def _write(folder: Path, config: bytes, weights: bytes) -> None:
    (folder / CONFIG_FILE).write_bytes(config)
    (folder / WEIGHTS_FILE).write_bytes(weights)
