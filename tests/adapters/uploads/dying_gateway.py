"""A gateway that stops in the middle of a part, of a whole upload, of a download and of a registration, until it is killed.

Its arguments: the data directory, the folder of the bucket, a tenant, a digest in the bucket, and the id of a version.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID, uuid4

from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.hashing_writer import write_chunks
from loraplex.adapters.storage.local_store import ADAPTERS_FOLDER, WEIGHTS_FILE, LocalAdapterStore
from loraplex.adapters.storage.object_store import ObjectStore
from loraplex.adapters.uploads.parts import UploadParts
from loraplex.adapters.versions.pending_folders import PendingFolders

HALF = 1 << 20


class StuckBucket(ObjectStore):
    """Sends the configuration, and half of the weights."""

    async def chunks(self, key: str) -> AsyncIterator[bytes]:
        async for chunk in half() if key.endswith(WEIGHTS_FILE) else configuration():
            yield chunk


async def configuration() -> AsyncIterator[bytes]:
    yield b"{}"


async def half() -> AsyncIterator[bytes]:
    yield bytes(HALF)
    await asyncio.Event().wait()


async def main(data: Path, bucket: Path, tenant: UUID, digest: str, version: UUID) -> None:
    storage = LocalAdapterStore(data / ADAPTERS_FOLDER)
    registered, staged = storage.make_staged(), storage.make_staged()
    (registered / WEIGHTS_FILE).write_bytes(bytes(HALF))
    pending = PendingFolders(storage.root).add(registered, version)
    parts = UploadParts(ObjectStore(data / "objects"))
    blobs = BlobStore(storage, StuckBucket(bucket), "b" * 64)
    stuck = [
        parts.receive(tenant, uuid4(), half(), name=WEIGHTS_FILE, size=2 * HALF, sha256=None),
        write_chunks(half(), staged / WEIGHTS_FILE, 2 * HALF, WEIGHTS_FILE),
        blobs.ensure_local(tenant, digest),
    ]
    running = [asyncio.ensure_future(each) for each in stuck]
    files: list[Path] = []
    while len(files) < 4:
        files = [each for each in data.rglob("*") if each.is_file() and each.stat().st_size == HALF]
        await asyncio.sleep(0.01)
    print("stuck", flush=True)
    await asyncio.gather(*running)
    pending.unlock()


if __name__ == "__main__":
    folder, objects, owner, content, identity = sys.argv[1:]
    asyncio.run(main(Path(folder), Path(objects), UUID(owner), content, UUID(identity)))
