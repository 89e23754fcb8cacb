"""The storage of this gateway as an operator sees it. Invariant: the answer takes `PROBE_S` at most, whatever the store does."""

import asyncio
from dataclasses import dataclass
from typing import Final

from loraplex.adapters.errors import StorageError
from loraplex.adapters.storage.free_space import DiskSpace
from loraplex.adapters.uploads.service import Uploads

PROBE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageHealth:
    """`store_error`: why the blob store does not answer, None if it does. `disk` None: the disk could not be asked.

    Below `floor_bytes` of free space uploads are refused.
    """

    store_error: str | None
    disk: DiskSpace | None
    floor_bytes: int

    @property
    def is_full(self) -> bool:
        """Whether uploads are refused for lack of space."""
        return self.disk is not None and self.disk.free_bytes < self.floor_bytes


async def storage_health(uploads: Uploads) -> StorageHealth:
    """Ask the blob store and the disk now."""
    error, disk = None, None
    try:
        async with asyncio.timeout(PROBE_S):
            disk = await uploads.disk_space()
            await uploads.require_store()
    except TimeoutError:
        error = f"no answer within {PROBE_S:g} s"
    except StorageError as refused:
        error = str(refused)
    return StorageHealth(store_error=error, disk=disk, floor_bytes=uploads.limits.storage_floor_bytes)


async def upload_trouble(uploads: Uploads) -> str | None:
    """Say why uploads are refused by this machine's disk; None while they are not."""
    floor = uploads.limits.storage_floor_bytes
    try:
        free = (await uploads.disk_space()).free_bytes
    except StorageError as error:
        return str(error)
    return f"{free} bytes of its disk are free, storage_floor_bytes is {floor}" if free < floor else None
