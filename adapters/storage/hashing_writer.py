"""A new private file that is counted and hashed while it is written.

Invariant: it never exceeds its limit, and begins no write that would leave less disk space free than its floor.
"""

import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from loraplex.adapters.errors import UploadTooLarge
from loraplex.adapters.storage.durable_files import create_private
from loraplex.adapters.storage.free_space import disk_errors, require_free
from loraplex.adapters.storage.threads import on_thread

WRITE_BYTES = 1 << 20
"""Bytes that are collected before a thread writes and hashes them, off the event loop."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """`size` in bytes, `sha256` in 64 hexadecimal digits."""

    size: int
    sha256: str


class HashedFile:
    """A context manager with blocking methods. `name` is the file's name in errors."""

    def __init__(self, path: Path, max_bytes: int, name: str, floor_bytes: int = 0) -> None:
        """Raises `StorageFull` or `BlobStoreUnavailable`, as all methods do when this machine cannot write."""
        with disk_errors():
            self._file = create_private(path)
        self._max_bytes = max_bytes
        self._name = name
        self._floor_bytes = floor_bytes
        self._size = 0
        self._sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Raises `UploadTooLarge` before more than the limit is written."""
        if self._size + len(data) > self._max_bytes:
            raise UploadTooLarge(self._name, f"is larger than {self._max_bytes} bytes")
        require_free(self._file.fileno(), self._floor_bytes, len(data))
        self._sha256.update(data)
        rest = memoryview(data)
        with disk_errors():
            while rest:
                rest = rest[self._file.write(rest) :]
        self._size += len(data)

    def finish(self) -> WrittenFile:
        """Sync the file to disk and close it."""
        with disk_errors():
            os.fsync(self._file.fileno())
            self._file.close()
        return WrittenFile(self._size, self._sha256.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


async def write_chunks(
    chunks: AsyncIterator[bytes], path: Path, max_bytes: int, name: str, floor_bytes: int = 0
) -> WrittenFile:
    """Write `chunks` to a new file; about `WRITE_BYTES` or one chunk are in memory until they are written.

    Raises `UploadTooLarge`, `StorageFull`, and what `chunks` raises; the caller removes the file.
    """
    with HashedFile(path, max_bytes, name, floor_bytes) as file:
        gathered = bytearray()
        async for chunk in chunks:
            if not gathered and len(chunk) >= WRITE_BYTES:
                await on_thread(file.write, chunk)
                continue
            gathered += chunk
            if len(gathered) >= WRITE_BYTES:
                await on_thread(file.write, bytes(gathered))
                gathered.clear()
        await on_thread(file.write, bytes(gathered))
        return await on_thread(file.finish)
