"""Objects under server-generated names, in a local folder or an S3 bucket (obstore), through one interface.

Invariant: an object is stored whole or not at all, and at most a few chunks of one are in memory.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store

from loraplex.adapters.errors import BlobMissing, BlobStoreUnavailable
from loraplex.adapters.storage.free_space import disk_errors
from loraplex.adapters.storage.threads import on_thread
from loraplex.adapters.storage.writers import Writer, make_private

if TYPE_CHECKING:
    from obstore import store
    from obstore.store import S3Config

CHUNK_BYTES: Final = 8 << 20
"""Size of the chunks in which objects are read and written, each within one request's timeout."""
MAX_CHUNKS_AT_ONCE: Final = 3
REQUEST_SECONDS: Final = 60
CONNECT_SECONDS: Final = 5
RETRIES: Final = 3
RETRY_SECONDS: Final = 60
AT_ONCE: Final = 1000
MAX_LISTINGS: Final = 3
_SPOOL: Final = "spool"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """The address of a bucket. Without keys the machine's own identity is used (instance role, web identity)."""

    bucket: str
    endpoint: str | None = None
    region: str | None = None
    prefix: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)


class ObjectStore:
    """`root` is this machine's private folder: of the objects themselves, or of files to be uploaded to the bucket."""

    def __init__(self, root: Path, bucket: S3Options | None = None) -> None:
        self._root = root
        self._remote = bucket is not None
        make_private(root)
        make_private(root / _SPOOL)
        self._writer = Writer(root / _SPOOL)
        with _store_errors("open"):
            self._store: store.ObjectStore = (
                LocalStore(root, automatic_cleanup=True) if bucket is None else _bucket(bucket)
            )

    def spooled(self) -> Path:
        """Return a path for a new file to be stored; the caller writes and removes it."""
        with disk_errors():
            return self._writer.new_path()

    def remove_abandoned(self, older_than_s: float) -> dict[str, int]:
        """Remove spooled files that ended processes left, or unchanged for so long; return the bytes of each."""
        return self._writer.remove_abandoned(older_than_s)

    async def take(self, spooled: Path, key: str) -> None:
        """Store a spooled file under `key` and remove it. Raises `BlobStoreUnavailable`."""
        if self._remote:
            await self.copy(spooled, key)
            await on_thread(spooled.unlink)
            return
        with _store_errors("write"):
            await obstore.rename_async(self._store, f"{_SPOOL}/{spooled.name}", key)

    async def copy(self, file: Path, key: str) -> None:
        """Store a file's content under `key`. Raises `BlobStoreUnavailable`."""
        with _store_errors("write"):
            await obstore.put_async(
                self._store, key, file, chunk_size=CHUNK_BYTES, max_concurrency=MAX_CHUNKS_AT_ONCE
            )

    async def chunks(self, key: str) -> AsyncIterator[bytes]:
        """Yield the content in chunks. Raises `BlobMissing`, `BlobStoreUnavailable`."""
        with _store_errors("read"):
            size = (await obstore.head_async(self._store, key))["size"]
        for start in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - start)
            with _store_errors("read"):
                chunk = await obstore.get_range_async(self._store, key, start=start, length=length)
            yield bytes(chunk)

    async def exists(self, key: str) -> bool:
        """Raises `BlobStoreUnavailable`."""
        try:
            with _store_errors("read"):
                await obstore.head_async(self._store, key)
        except BlobMissing:
            return False
        return True

    async def delete(self, key: str) -> None:
        """Delete the object, if it exists. Raises `BlobStoreUnavailable`."""
        await self._delete([key])

    async def delete_below(self, folder: str) -> None:
        """Delete every object whose key begins with `folder` and a slash. Raises `BlobStoreUnavailable`."""
        for _ in range(MAX_LISTINGS):
            keys = await self._keys_below(folder)
            if not keys:
                return
            for start in range(0, len(keys), AT_ONCE):
                await self._delete(keys[start : start + AT_ONCE])

    async def folders(self, folder: str) -> list[str]:
        """Return the names directly below `folder` that contain something. Raises `BlobStoreUnavailable`."""
        with _store_errors("list"):
            listed = await obstore.list_with_delimiter_async(self._store, folder)
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"])

    async def _delete(self, keys: list[str]) -> None:
        try:
            with _store_errors("delete"):
                await obstore.delete_async(self._store, keys)
        except BlobMissing:
            # Another process deletes the same objects; the next listing finds the rest.
            return

    async def _keys_below(self, folder: str) -> list[str]:
        with _store_errors("list"):
            batches = obstore.list(self._store, folder, chunk_size=AT_ONCE)
            return [entry["path"] async for batch in batches for entry in batch]


def _bucket(options: S3Options) -> S3Store:
    config: S3Config = {}
    if options.endpoint is not None:
        config["endpoint"] = options.endpoint
    if options.region is not None:
        config["region"] = options.region
    if options.access_key_id is not None and options.secret_access_key is not None:
        config["access_key_id"] = options.access_key_id
        config["secret_access_key"] = options.secret_access_key
    insecure = options.endpoint is not None and options.endpoint.startswith("http://")
    return S3Store(
        options.bucket,
        prefix=options.prefix,
        config=config,
        client_options={
            "timeout": f"{REQUEST_SECONDS}s",
            "connect_timeout": f"{CONNECT_SECONDS}s",
            "allow_http": insecure,
        },
        retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
    )


@contextmanager
def _store_errors(action: str) -> Iterator[None]:
    """Convert store errors, whose text may contain addresses and object keys: they become the cause, never the
    message.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise BlobMissing("no such object is stored") from error
    except (BaseError, OSError) as error:
        raise BlobStoreUnavailable(f"the blob store could not {action}") from error
