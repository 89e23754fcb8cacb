"""`Writer`: temporary files in a folder that processes share, and the removal of what ended processes left there.

Invariant: a writer holds its lock (flock(2)) as long as its object lives, and its temporary names begin with the lock's name.
"""

import fcntl
import os
import shutil
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from loraplex.adapters.errors import StorageError

_LOCKS = ".writers"
# NFS gives an exclusive lock only for writing.
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class Writer:
    """The temporary files of one process in `folder`. Its locks lie beside that, so that the folder holds nothing else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks = folder.parent / _LOCKS
        self._name: str | None = None
        self._naming = threading.Lock()

    def new_path(self) -> Path:
        """Return a path of no other process. Raises `StorageError`, `OSError`."""
        with self._naming:
            if self._name is None:
                make_private(self._folder.parent)
                make_private(self._folder)
                make_private(self._locks)
                self._name = self._lock()
        return self._folder / f"{self._name}-{uuid4().hex}"

    def remove_abandoned(self, older_than_s: float) -> dict[str, int]:
        """Remove what ended processes left, and what was last changed longer ago; return the bytes of each by its path."""
        removed = {}
        for entry in [*os.scandir(self._folder)] if self._folder.is_dir() else ():
            owner, dash, _ = entry.name.partition("-")
            with suppress(FileNotFoundError):  # Another process removes it, too.
                age_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if (dash and self._has_ended(owner)) or age_s > older_than_s:
                    removed[entry.path] = _remove(Path(entry.path))
        for lock in [*self._locks.iterdir()] if self._locks.is_dir() else ():
            self._has_ended(lock.name, forget=True)
        return removed

    def _lock(self) -> str:
        while True:
            lock = self._locks / uuid4().hex
            descriptor = os.open(lock, _OPEN | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                weakref.finalize(self, os.close, descriptor)
                return lock.name
            os.close(descriptor)  # Another process took it for that of an ended one before it was locked.

    def _has_ended(self, owner: str, *, forget: bool = False) -> bool:
        """Whether no process holds the lock; `forget`: remove it then."""
        try:
            descriptor = os.open(self._locks / owner, _OPEN)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if forget:
                (self._locks / owner).unlink(missing_ok=True)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True


def make_private(folder: Path) -> None:
    """Create a folder of mode 0700. Raises `StorageError` for a symbolic link."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise StorageError(f"{folder} is a symbolic link")


def _remove(path: Path) -> int:
    """Remove a file, or a folder with all it holds; return its bytes."""
    if path.is_symlink() or not path.is_dir():
        size = path.lstat().st_size
        path.unlink()
        return size
    size = sum(each.lstat().st_size for each in path.rglob("*") if not each.is_dir())
    shutil.rmtree(path)
    return size
