"""Content-addressed storage of validated adapters: `root/<tenant uuid>/<digest>/`, private to this user.

Invariant: no part of a path comes from a client, no link is followed, and a blob is stored whole or not at all.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from loraplex.adapters.digest import adapter_digest
from loraplex.adapters.errors import BlobCorrupt, BlobMissing, FolderRejected, StorageError
from loraplex.adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraplex.adapters.storage.durable_files import sync_folder, write_private
from loraplex.adapters.storage.free_space import disk_errors
from loraplex.adapters.storage.safe_files import hash_regular, read_regular
from loraplex.adapters.storage.writers import Writer, make_private

ADAPTERS_FOLDER = "adapters"
"""The storage's root below a data directory."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_STAGING = ".staging"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TENANT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def max_file_bytes(limits: AdapterLimits) -> dict[str, int]:
    """Return the most bytes that each of the two files of an adapter may have, by name."""
    return {CONFIG_FILE: limits.max_config_bytes, WEIGHTS_FILE: limits.max_weights_bytes}


class LocalAdapterStore:
    """Blobs are keyed by (tenant, digest): two tenants never share one, not even of equal content."""

    def __init__(self, root: Path, limits: AdapterLimits = DEFAULT_LIMITS) -> None:
        self.root = root
        self._limits = limits
        self._writer = Writer(root / _STAGING)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a private folder on the same file system; it is removed at the end unless `put` has taken it."""
        folder = self.make_staged()
        try:
            yield folder
        finally:
            remove_staged(folder)

    def make_staged(self) -> Path:
        """Create such a folder; its owner removes it with `remove_staged`. Raises `StorageFull`, `BlobStoreUnavailable`."""
        with disk_errors():
            folder = self._writer.new_path()
            folder.mkdir(mode=0o700)
        return folder

    def put(self, tenant_id: UUID, digest: str, staged: Path) -> Path:
        """Move a staged folder of the two files into place in one atomic step. An existing equal blob stays."""
        if sorted(file.name for file in staged.iterdir()) != [CONFIG_FILE, WEIGHTS_FILE]:
            raise StorageError(f"a blob is made of exactly {CONFIG_FILE} and {WEIGHTS_FILE}")
        final = self.location(tenant_id, digest)
        make_private(final.parent)
        sync_folder(staged)
        if not self.exists(tenant_id, digest):
            try:
                staged.rename(final)
            except OSError:
                # Another push of equal content was first.
                if not self.exists(tenant_id, digest):
                    raise
        sync_folder(final.parent)
        return final

    def exists(self, tenant_id: UUID, digest: str) -> bool:
        final = self.location(tenant_id, digest)
        return final.is_dir() and not final.is_symlink() and not final.parent.is_symlink()

    def path(self, tenant_id: UUID, digest: str) -> Path:
        """Return the blob's folder. Raises `BlobMissing`."""
        if not self.exists(tenant_id, digest):
            raise BlobMissing(f"no adapter {digest} is stored for this tenant")
        return self.location(tenant_id, digest)

    def delete(self, tenant_id: UUID, digest: str) -> None:
        """Delete a blob, in one atomic step for readers. Raises `BlobMissing`."""
        blob = self.path(tenant_id, digest)
        with self.staging() as folder:
            try:
                blob.rename(folder / digest)
            except FileNotFoundError as error:
                # Another process has removed it.
                raise BlobMissing(f"no adapter {digest} is stored for this tenant") from error

    def tenants(self) -> list[UUID]:
        """Return the tenants that have or had blobs here."""
        names = [folder.name for folder in self.root.iterdir()] if self.root.is_dir() else []
        return [UUID(name) for name in names if _TENANT.fullmatch(name)]

    def digests(self, tenant_id: UUID) -> list[str]:
        """Return the digests of a tenant's blobs here."""
        folder = self.root / str(UUID(int=tenant_id.int))
        if not folder.is_dir() or folder.is_symlink():
            return []
        try:
            entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in os.scandir(folder)]
        except FileNotFoundError:
            # Its tenant was deleted meanwhile.
            return []
        return [name for name, is_folder in entries if is_folder and _DIGEST.fullmatch(name)]

    def delete_tenant(self, tenant_id: UUID) -> None:
        """Delete all blobs of a tenant, if any, in one atomic step for readers."""
        folder = self.root / str(UUID(int=tenant_id.int))
        if not folder.is_dir() or folder.is_symlink():
            return
        with self.staging() as taken:
            folder.rename(taken / folder.name)

    def remove_abandoned(self, older_than_s: float) -> dict[str, int]:
        """Remove staged folders that ended processes left, or unchanged for so long; return the bytes of each."""
        return self._writer.remove_abandoned(older_than_s)

    def verify(self, tenant_id: UUID, digest: str, base_model_digest: str) -> None:
        """Read everything again. Raises `BlobMissing`, or `BlobCorrupt` when the content does not match the digest."""
        blob = self.path(tenant_id, digest)
        try:
            config = read_regular(blob / CONFIG_FILE, max_bytes=self._limits.max_config_bytes)
            weights = hash_regular(blob / WEIGHTS_FILE, max_bytes=self._limits.max_weights_bytes)
        except FolderRejected as error:
            raise BlobCorrupt(f"adapter {digest}: {error}") from error
        if adapter_digest(config, weights, base_model_digest) != digest:
            raise BlobCorrupt(f"adapter {digest}: its content has changed, or its base model is another")

    def location(self, tenant_id: UUID, digest: str) -> Path:
        """Return the blob's folder, whether or not it exists. Raises `StorageError`."""
        if not _DIGEST.fullmatch(digest):
            raise StorageError("a digest has 64 hexadecimal digits")
        return self.root / str(UUID(int=tenant_id.int)) / digest

    def tenant_of(self, folder: Path) -> UUID | None:
        """Return the tenant of a blob's folder, the inverse of `location`; None for any other folder."""
        tenant = folder.parent
        is_blob = (
            tenant.parent == self.root and _TENANT.fullmatch(tenant.name) and _DIGEST.fullmatch(folder.name)
        )
        return UUID(tenant.name) if is_blob else None


def keep_canonical(staged: Path, canonical: bytes) -> None:
    """Replace the configuration in a staged folder by its validated, canonical form."""
    draft = staged.with_name(f"{staged.name}.json")
    draft.unlink(missing_ok=True)
    write_private(draft, canonical)
    draft.replace(staged / CONFIG_FILE)


def remove_staged(folder: Path) -> None:
    """Remove a staged folder, if it still exists."""
    if folder.exists():
        shutil.rmtree(folder)
