"""`LocalCache`: local copies of a bucket's adapters, bounded by bytes, with LRU eviction.

Invariant: a copy is evicted only after `in_use_s` without use, longer than any request lives, and only if the bucket
has or had it. All processes read a folder's last use from its mtime, and that it was fetched from its mode.
"""

import fcntl
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from uuid import UUID

from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.adapters.storage.threads import on_thread
from loraplex.adapters.storage.writers import make_private

USE_RESOLUTION_S: Final = 30.0
"""A use is recorded only if the last record is older, so that a busy adapter costs no writes."""
_LOCK: Final = ".eviction.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCacheConfig:
    """`max_bytes` of all copies together, unless those used within `in_use_s` seconds are larger."""

    max_bytes: int = 64 << 30
    in_use_s: float = 2100.0


DEFAULT_COPY_LIMITS: Final = LocalCacheConfig()


@dataclass(frozen=True, slots=True)
class _Copy:
    used_at: float
    was_fetched: bool
    size_bytes: int
    tenant_id: UUID
    digest: str


class LocalCache:
    """The copies of all processes that share `storage`."""

    def __init__(self, storage: LocalAdapterStore, limits: LocalCacheConfig = DEFAULT_COPY_LIMITS) -> None:
        self._storage = storage
        self._limits = limits

    async def use(self, tenant_id: UUID, digest: str) -> bool:
        """Record a use and return whether the copy is here; it then stays for `in_use_s`."""
        used_at = self._used_at(tenant_id, digest)
        if used_at is None or _is_recent(used_at):
            # No eviction can choose it before `in_use_s`, so no lock is needed.
            return used_at is not None
        return await on_thread(self._record_use, tenant_id, digest)

    async def evict(self, is_stored: Callable[[UUID, str], Awaitable[bool]]) -> int:
        """Remove copies down to `max_bytes`, only those fetched or `is_stored`; return how many.

        Raises what `is_stored` does.
        """
        copies = await on_thread(lambda: sorted(self._found(), key=lambda copy: copy.used_at))
        excess, removed = sum(copy.size_bytes for copy in copies) - self._limits.max_bytes, 0
        for copy in copies:
            if excess <= 0 or not self._is_unused(copy.used_at):
                break
            if not (copy.was_fetched or await is_stored(copy.tenant_id, copy.digest)):
                continue
            outcome = await on_thread(self._remove, copy)
            # A copy that another process has removed since takes no space either.
            excess -= 0 if outcome == "used" else copy.size_bytes
            removed += outcome == "removed"
        return removed

    def _record_use(self, tenant_id: UUID, digest: str) -> bool:
        # The shared lock keeps an eviction, which locks exclusively, out between test and record.
        with self._locked(fcntl.LOCK_SH), suppress(FileNotFoundError):
            used_at = self._used_at(tenant_id, digest)
            if used_at is not None and not _is_recent(used_at):
                os.utime(self._storage.location(tenant_id, digest))
            return used_at is not None
        # Its adapter was deleted meanwhile.
        return False

    def _remove(self, copy: _Copy) -> Literal["removed", "used", "gone"]:
        """Remove the copy at once; processes that have its files open can still read them."""
        with self._storage.staging() as staged, self._locked(fcntl.LOCK_EX):
            used_at = self._used_at(copy.tenant_id, copy.digest)
            if used_at is None:
                return "gone"
            if not self._is_unused(used_at):
                return "used"
            try:
                self._storage.location(copy.tenant_id, copy.digest).rename(staged / copy.digest)
            except FileNotFoundError:
                return "gone"
            return "removed"

    def _used_at(self, tenant_id: UUID, digest: str) -> float | None:
        """Return the time of the last recorded use; None if the copy is not here."""
        if not self._storage.exists(tenant_id, digest):
            return None
        try:
            return self._storage.location(tenant_id, digest).stat().st_mtime
        except FileNotFoundError:
            return None

    def _is_unused(self, used_at: float) -> bool:
        return time.time() - used_at > self._limits.in_use_s + USE_RESOLUTION_S

    def _found(self) -> Iterator[_Copy]:
        for tenant_id in self._storage.tenants():
            for digest in self._storage.digests(tenant_id):
                folder = self._storage.root / str(tenant_id) / digest
                try:
                    sizes = [file.stat().st_size for file in folder.iterdir()]
                    found = folder.stat()
                except FileNotFoundError:
                    # Its adapter was deleted meanwhile.
                    continue
                was_fetched = bool(found.st_mode & stat.S_ISVTX)
                yield _Copy(found.st_mtime, was_fetched, sum(sizes), tenant_id, digest)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Hold the lock for a few file-system calls; the kernel frees it when its process dies."""
        make_private(self._storage.root)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._storage.root / _LOCK, flags, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            yield
        finally:
            os.close(descriptor)


def _is_recent(used_at: float) -> bool:
    return abs(time.time() - used_at) <= USE_RESOLUTION_S


def mark_fetched(staged: Path) -> None:
    """Mark a folder from the bucket as a copy that is used now, however long its download took."""
    os.chmod(staged, stat.S_IRWXU | stat.S_ISVTX)
    os.utime(staged)
