"""`PendingFolders`: uploaded folders that wait for validation, each locked by one process of all that share the
storage.

Invariant: a folder stays locked while its process lives (flock(2)); another process may resume an unlocked one.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from loraplex.adapters.errors import StorageError
from loraplex.adapters.storage.free_space import disk_errors

PENDING_FOLDER = ".validating"
GATEWAYS_LOCK = "gateways.lock"
_LOCK_SUFFIX = ".lock"
_NEW_SUFFIX = ".new"
_LOCK_NAME = re.compile(r"([0-9a-f]{32})\.lock")


@dataclass(slots=True)
class PendingFolder:
    """`folder` has the two files, unless they are stored already. `discard` or `unlock` ends the lock."""

    version_id: UUID
    folder: Path
    _lock: Path
    _descriptor: int

    def discard(self) -> None:
        """Delete the files and the lock. Idempotent."""
        if self._descriptor >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.with_name(f"{self.folder.name}.json").unlink(missing_ok=True)
            self._lock.unlink(missing_ok=True)
            self.unlock()

    def unlock(self) -> None:
        """Unlock the folder, so that another process may resume it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class PendingFolders:
    """`root` is that of the `LocalAdapterStore`, on whose file system uploads are staged."""

    def __init__(self, root: Path) -> None:
        self._root = root / PENDING_FOLDER

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Show other processes that this one resumes abandoned folders, until the context ends. Raises `StorageError`."""
        with disk_errors():
            self._make_root()
            descriptor = _open_lock(self._root / GATEWAYS_LOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield
        finally:
            os.close(descriptor)

    def is_watched(self) -> bool:
        """Return whether a process resumes abandoned folders now. Raises `StorageError`."""
        try:
            with _opened(self._root, os.O_DIRECTORY) as root, _opened(self._root / GATEWAYS_LOCK) as lock:
                # Commands look one at a time: they would take each other's lock for that of a server.
                fcntl.flock(root, fcntl.LOCK_EX)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            raise StorageError(f"{self._root} cannot be read: {error.strerror}") from error
        return False

    def is_pending(self, version_id: UUID) -> bool:
        """Return whether the folder still waits for its result, which is written before it is discarded."""
        return (self._root / f"{version_id.hex}{_LOCK_SUFFIX}").exists()

    def add(self, staged: Path, version_id: UUID) -> PendingFolder:
        """Take a staged folder over in one step and lock it. Raises `StorageError`."""
        with disk_errors():
            self._make_root()
            pending = self._locked(version_id)
            try:
                staged.rename(pending.folder)
            except OSError:
                pending.discard()
                raise
        return pending

    def abandoned(self) -> Iterator[PendingFolder]:
        """Lock and yield each pending folder whose owner process has died. Other files are ignored."""
        for lock in sorted(self._root.glob(f"*{_LOCK_SUFFIX}")):
            name = _LOCK_NAME.fullmatch(lock.name)
            pending = None if name is None else self._lock(UUID(hex=name[1]))
            if pending is not None:
                yield pending

    def _make_root(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._root.is_symlink():
            raise StorageError(f"{self._root} is a symbolic link")

    def _locked(self, version_id: UUID) -> PendingFolder:
        """Make the lock of a new folder. It gets its name when it is locked: one that is not yet looks abandoned."""
        folder = self._root / version_id.hex
        lock = folder.with_name(f"{version_id.hex}{_LOCK_SUFFIX}")
        unnamed = folder.with_name(f"{version_id.hex}{_NEW_SUFFIX}")
        descriptor = _open_lock(unnamed)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.link(unnamed, lock)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, FileExistsError):
                raise StorageError("an upload of this version is pending already") from error
            raise
        finally:
            unnamed.unlink(missing_ok=True)
        return PendingFolder(version_id, folder, lock, descriptor)

    def _lock(self, version_id: UUID) -> PendingFolder | None:
        """Lock an abandoned folder; None while another process has the lock, or once it is discarded."""
        folder = self._root / version_id.hex
        lock = folder.with_name(f"{version_id.hex}{_LOCK_SUFFIX}")
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if not os.fstat(descriptor).st_nlink:
            # Its owner discarded it between the two calls.
            os.close(descriptor)
            return None
        return PendingFolder(version_id, folder, lock, descriptor)


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
