"""The parts of uploads as objects, keyed (tenant, upload, object), and their assembly to a file.

Each received part is a new object, so two senders of one part never mix bytes. Invariant: a part has exactly the size
of its number; all but a file's last have the part size.
"""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID, uuid4

from loraplex.adapters.errors import BlobMissing, ChecksumMismatch, PartRefused, PartsMissing
from loraplex.adapters.storage.free_space import require_free
from loraplex.adapters.storage.hashing_writer import WrittenFile, write_chunks
from loraplex.adapters.storage.object_store import ObjectStore
from loraplex.adapters.storage.threads import on_thread
from loraplex.tenants.registry.records import part_count
from loraplex.tenants.registry.uploads import DeclaredFile

_UPLOADS: Final = "uploads"
PROBE: Final = f"{_UPLOADS}/probe"
"""A key that no object has: asking for it shows whether the store answers."""
_IDENTITY: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
NAMED_MISSING: Final = 20


@dataclass(frozen=True, slots=True)
class StoredPart:
    """`size` in bytes, `sha256` in 64 hexadecimal digits."""

    object_id: UUID
    size: int
    sha256: str


def part_size(file: DeclaredFile, number: int, part_bytes: int) -> int:
    """Return the size in bytes of part `number`. Raises `PartRefused` for one that the file does not have."""
    count = part_count(file.size, part_bytes)
    if not 1 <= number <= count:
        raise PartRefused(
            file.name, f"has the parts 1 to {count} of {part_bytes} bytes each, the last may be shorter"
        )
    return min(part_bytes, file.size - (number - 1) * part_bytes)


def require_all(files: Sequence[DeclaredFile], part_bytes: int, received: Mapping[str, set[int]]) -> None:
    """Raises `PartsMissing`, naming the first missing parts."""
    missing = [
        f"{file.name} {number}"
        for file in files
        for number in range(1, part_count(file.size, part_bytes) + 1)
        if number not in received.get(file.name, set())
    ]
    if missing:
        more = f" and {len(missing) - NAMED_MISSING} more" if len(missing) > NAMED_MISSING else ""
        raise PartsMissing("parts", f"missing are {', '.join(missing[:NAMED_MISSING])}{more}")


class UploadParts:
    """The parts of all tenants' uploads. `floor_bytes` of disk space stay free, where parts are received and assembled."""

    def __init__(self, objects: ObjectStore, floor_bytes: int = 0) -> None:
        self._objects = objects
        self._floor_bytes = floor_bytes

    async def require_store(self) -> None:
        """Raise `BlobStoreUnavailable` unless the folder or the bucket of blobs answers."""
        await self._objects.exists(PROBE)

    async def receive(
        self,
        tenant_id: UUID,
        upload_id: UUID,
        chunks: AsyncIterator[bytes],
        *,
        name: str,
        size: int,
        sha256: str | None,
    ) -> StoredPart:
        """Stores a part of exactly `size` bytes.

        Raises `PartRefused`, `UploadTooLarge`, `ChecksumMismatch`, `StorageFull` and what `chunks` raises; nothing is
        left then.
        """
        spooled = self._objects.spooled()
        await on_thread(require_free, spooled.parent, self._floor_bytes, size)
        try:
            written = await write_chunks(chunks, spooled, size, name, self._floor_bytes)
            _require(written, name, size, sha256)
            object_id = uuid4()
            await self._objects.take(spooled, _key(tenant_id, upload_id, object_id))
        finally:
            spooled.unlink(missing_ok=True)
        return StoredPart(object_id, written.size, written.sha256)

    async def assemble(
        self, tenant_id: UUID, upload_id: UUID, file: DeclaredFile, objects: Sequence[UUID], path: Path
    ) -> None:
        """Write the new file `path` from its parts in order. Raises `ChecksumMismatch`, `PartsMissing`, `StorageFull`."""
        await on_thread(require_free, path.parent, self._floor_bytes, file.size)

        async def chunks() -> AsyncIterator[bytes]:
            for number, object_id in enumerate(objects, 1):
                try:
                    async for chunk in self._objects.chunks(_key(tenant_id, upload_id, object_id)):
                        yield chunk
                except BlobMissing as error:
                    raise PartsMissing(file.name, f"part {number} was lost: send it again") from error

        written = await write_chunks(chunks(), path, file.size, file.name, self._floor_bytes)
        if written.sha256 != file.sha256:
            raise ChecksumMismatch(
                file.name,
                f"its {written.size} bytes have the SHA-256 {written.sha256}, declared was {file.sha256}; "
                "send the parts that differ again",
            )

    async def delete(self, tenant_id: UUID, upload_id: UUID, object_id: UUID) -> None:
        """Delete one part, if it still exists."""
        await self._objects.delete(_key(tenant_id, upload_id, object_id))

    async def delete_upload(self, tenant_id: UUID, upload_id: UUID) -> None:
        """Delete all parts of an upload."""
        await self._objects.delete_below(f"{_UPLOADS}/{_name(tenant_id)}/{_name(upload_id)}")

    async def delete_tenant(self, tenant_id: UUID) -> None:
        """Delete all parts of a tenant's uploads."""
        await self._objects.delete_below(f"{_UPLOADS}/{_name(tenant_id)}")

    async def uploads(self) -> list[tuple[UUID, UUID]]:
        """Return (tenant, upload) of all uploads with a stored part. Other objects are ignored."""
        return [
            (UUID(tenant), UUID(upload))
            for tenant in await self._identities(_UPLOADS)
            for upload in await self._identities(f"{_UPLOADS}/{tenant}")
        ]

    async def _identities(self, folder: str) -> list[str]:
        return [name for name in await self._objects.folders(folder) if _IDENTITY.fullmatch(name)]

    async def remove_abandoned(self, older_than_s: float) -> dict[str, int]:
        """Remove spooled files that ended processes left, or unchanged for so long; return the bytes of each."""
        return await on_thread(self._objects.remove_abandoned, older_than_s)


def _require(written: WrittenFile, name: str, size: int, sha256: str | None) -> None:
    if written.size != size:
        raise PartRefused(name, f"the part has {written.size} bytes, it must have {size}")
    if sha256 is not None and written.sha256 != sha256:
        raise ChecksumMismatch(name, f"the part's SHA-256 is {written.sha256}, Content-Digest says {sha256}")


def _key(tenant_id: UUID, upload_id: UUID, object_id: UUID) -> str:
    return f"{_UPLOADS}/{_name(tenant_id)}/{_name(upload_id)}/{_name(object_id)}"


def _name(identity: UUID) -> str:
    return str(UUID(int=identity.int))
