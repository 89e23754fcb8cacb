"""Finished adapters, keyed (tenant, digest): in the local folder and, if there is one, in the bucket.

Invariant: `ensure_local` returns content that matches its digest. With a bucket the local folder is a cache of
bounded size, without one it is the only place.
"""

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final
from uuid import UUID

import structlog

from loraplex.adapters.digest import adapter_digest
from loraplex.adapters.errors import (
    BlobCorrupt,
    BlobMissing,
    BlobStoreUnavailable,
    StorageError,
    StorageFull,
    UploadTooLarge,
)
from loraplex.adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraplex.adapters.storage.hashing_writer import WrittenFile, write_chunks
from loraplex.adapters.storage.local_cache import (
    DEFAULT_COPY_LIMITS,
    LocalCache,
    LocalCacheConfig,
    mark_fetched,
)
from loraplex.adapters.storage.local_store import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LocalAdapterStore,
    max_file_bytes,
    remove_staged,
)
from loraplex.adapters.storage.object_store import ObjectStore
from loraplex.adapters.storage.threads import on_thread
from loraplex.tenants.single_flight import SingleFlight

LOG = structlog.get_logger("loraplex.blobs")

MAX_FETCHES: Final = 4
MAX_ATTEMPTS: Final = 3
EVICTION_SECONDS: Final = 60.0
_ADAPTERS: Final = "adapters"


class BlobStore:
    """`bucket` is None where the local folder is the only place."""

    def __init__(
        self,
        storage: LocalAdapterStore,
        bucket: ObjectStore | None,
        base_model_digest: str,
        limits: AdapterLimits = DEFAULT_LIMITS,
        copy_limits: LocalCacheConfig = DEFAULT_COPY_LIMITS,
    ) -> None:
        self.storage = storage
        self._copies = LocalCache(storage, copy_limits)
        self._has_grown = asyncio.Event()
        self._bucket = bucket
        self._base_model_digest = base_model_digest
        self._limits = limits
        # A download goes on for the next caller.
        self._fetches = SingleFlight[Path](cancels=False)
        self._fetching = asyncio.Semaphore(MAX_FETCHES)

    async def store(self, tenant_id: UUID, digest: str, staged: Path) -> Path:
        """Take over a staged folder of the two files, whose digest the caller has computed. Raises `StorageError`.

        If publishing fails the adapter is stored locally and no longer staged; the same call then continues from
        there.
        """
        if staged.is_dir() or not self.storage.exists(tenant_id, digest):
            await on_thread(self.storage.put, tenant_id, digest, staged)
        await self.publish(tenant_id, digest)
        return self.storage.path(tenant_id, digest)

    async def publish(self, tenant_id: UUID, digest: str) -> None:
        """Copy a stored adapter to the bucket for other machines. Raises `BlobMissing`, `BlobStoreUnavailable`."""
        folder = self.storage.path(tenant_id, digest)
        if self._bucket is not None:
            # Record a use, so that an equal blob, long unused, is not evicted while it is read.
            await self._copies.use(tenant_id, digest)
            for file in (WEIGHTS_FILE, CONFIG_FILE):
                await self._bucket.copy(folder / file, _key(tenant_id, digest, file))

    async def ensure_stored(self, tenant_id: UUID, digest: str) -> None:
        """Finish a `store` whose process died.

        Raises `BlobMissing` where the files are neither local nor published, `BlobStoreUnavailable`.
        """
        if not await self._is_published(tenant_id, digest):
            await self.publish(tenant_id, digest)

    async def ensure_local(self, tenant_id: UUID, digest: str) -> Path:
        """Return the adapter's folder on this machine; concurrent callers share one download.

        It stays for `LocalCacheConfig.in_use_s`. Raises `BlobMissing`, `BlobCorrupt`, `BlobStoreUnavailable`.
        """
        if self._bucket is None:
            return self.storage.path(tenant_id, digest)
        for _ in range(MAX_ATTEMPTS):
            if await self._copies.use(tenant_id, digest):
                return self.storage.path(tenant_id, digest)
            fetch = partial(self._fetch, self._bucket, tenant_id, digest)
            await self._fetches.run((tenant_id, digest), fetch)
        raise BlobMissing(f"adapter {digest} was removed while it was fetched")

    async def run_eviction(self) -> None:
        """Keep the local copies within their bound until cancelled; a failed round is logged and the next one
        retries.
        """
        while True:
            try:
                await self.evict()
            except (StorageError, OSError) as error:
                LOG.warning("copies of adapters were not removed", reason=str(error))
            except Exception:
                # Logged; one unexpected error must not let the disk fill up.
                LOG.exception("removing copies of adapters failed")
            self._has_grown.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(EVICTION_SECONDS):
                    await self._has_grown.wait()

    async def evict(self) -> int:
        """Remove the least recently used copies beyond the bound; return how many. Raises `BlobStoreUnavailable`,
        `OSError`.
        """
        return 0 if self._bucket is None else await self._copies.evict(self._is_published)

    async def _is_published(self, tenant_id: UUID, digest: str) -> bool:
        if self._bucket is None:
            return False
        keys = [_key(tenant_id, digest, file) for file in (WEIGHTS_FILE, CONFIG_FILE)]
        return all([await self._bucket.exists(key) for key in keys])

    async def delete(self, tenant_id: UUID, digest: str) -> None:
        """Delete the adapter here and in the bucket, if it is there. Raises `BlobStoreUnavailable`."""
        here = self.storage.exists(tenant_id, digest)
        if self._bucket is not None:
            await self._bucket.delete_below(_folder(tenant_id, digest))
        if here:
            # Another gateway's eviction may have removed it.
            with suppress(BlobMissing):
                await on_thread(self.storage.delete, tenant_id, digest)

    async def delete_tenant(self, tenant_id: UUID) -> None:
        """Delete all adapters of a tenant. Raises `BlobStoreUnavailable`."""
        if self._bucket is not None:
            await self._bucket.delete_below(f"{_ADAPTERS}/{_name(tenant_id)}")
        await on_thread(self.storage.delete_tenant, tenant_id)

    async def _fetch(self, bucket: ObjectStore, tenant_id: UUID, digest: str) -> Path:
        async with self._fetching:
            try:
                return await self._fetch_to_disk(bucket, tenant_id, digest)
            except StorageFull as error:
                # The caller is no upload: it may succeed on another machine, or after the next eviction.
                raise BlobStoreUnavailable(f"adapter {digest}: no disk space for a copy") from error
            finally:
                self._has_grown.set()

    async def _fetch_to_disk(self, bucket: ObjectStore, tenant_id: UUID, digest: str) -> Path:
        staged = await on_thread(self.storage.make_staged)
        try:
            config = await self._download(bucket, tenant_id, digest, CONFIG_FILE, staged)
            weights = await self._download(bucket, tenant_id, digest, WEIGHTS_FILE, staged)
            content = await on_thread((staged / CONFIG_FILE).read_bytes)
            sha256 = bytes.fromhex(weights.sha256)
            if config.size == 0 or adapter_digest(content, sha256, self._base_model_digest) != digest:
                raise BlobCorrupt(f"adapter {digest}: what the bucket holds is not its content")
            mark_fetched(staged)
            return await on_thread(self.storage.put, tenant_id, digest, staged)
        finally:
            await on_thread(remove_staged, staged)

    async def _download(
        self, bucket: ObjectStore, tenant_id: UUID, digest: str, file: str, staged: Path
    ) -> WrittenFile:
        chunks = bucket.chunks(_key(tenant_id, digest, file))
        try:
            return await write_chunks(chunks, staged / file, max_file_bytes(self._limits)[file], file)
        except BlobMissing as error:
            raise BlobMissing(f"no adapter {digest} is stored for this tenant") from error
        except UploadTooLarge as error:
            raise BlobCorrupt(f"adapter {digest}: {error}") from error


def _key(tenant_id: UUID, digest: str, file: str) -> str:
    return f"{_folder(tenant_id, digest)}/{file}"


def _folder(tenant_id: UUID, digest: str) -> str:
    return f"{_ADAPTERS}/{_name(tenant_id)}/{digest}"


def _name(tenant_id: UUID) -> str:
    return str(UUID(int=tenant_id.int))
