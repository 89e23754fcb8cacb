"""The folder of all journals on one data directory: a file and a lock for each gateway.

Invariant: at most one process has a journal. Locks belong to open files (flock), so a killed process releases them at once.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from uuid import UUID

from loraplex.tenants.errors import JournalUnavailable

SUFFIX: Final = ".sqlite"
UNREADABLE: Final = ".unreadable"
# A journal's write-ahead log is beside it.
LOG_SUFFIX: Final = "-wal"


class JournalLock:
    """The lock of one journal, taken; `path` is the journal's file, readable by its owner alone."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, folder: Path, gateway_id: UUID) -> "JournalLock | None":
        """Lock a gateway's journal; None if another process has it. Raises `OSError`."""
        path = folder / f"{gateway_id}{SUFFIX}"
        descriptor = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(path, descriptor)

    def create(self) -> None:
        """Create the file if there is none. Raises `OSError`."""
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        sync_folder(self.path.parent)

    def release(self) -> None:
        """Let another process have the journal."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Delete the journal and release it."""
        self.path.unlink(missing_ok=True)
        self._unlock()

    def move_aside(self) -> Path:
        """Rename a journal that cannot be read, with its log, and release it. Its new name ends in `.unreadable`."""
        aside = self.path.with_name(self.path.name + UNREADABLE)
        log = Path(f"{self.path}{LOG_SUFFIX}")
        if log.exists():
            log.replace(f"{aside}{LOG_SUFFIX}")
        self.path.replace(aside)
        sync_folder(self.path.parent)
        self._unlock()
        return aside

    def _unlock(self) -> None:
        _lock_path(self.path).unlink(missing_ok=True)
        self.release()


def prepare(folder: Path) -> None:
    """Create the folder of the journals. Raises `JournalUnavailable`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_folder(folder.parent)
    except OSError as error:
        raise JournalUnavailable(f"the folder of the usage journals cannot be used: {error}") from error


def ended_gateways(folder: Path) -> Iterator[tuple[UUID, JournalLock]]:
    """Lock and yield the journals that no process has. The caller releases, removes or moves each."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        gateway_id = UUID(path.stem)
        lock = JournalLock.take(folder, gateway_id)
        if lock is None:
            continue
        if path.exists():
            yield gateway_id, lock
        else:
            lock.remove()


def count_unreadable(folder: Path) -> int:
    """How many journals were moved aside."""
    return len([*folder.glob(f"*{UNREADABLE}")])


def sync_folder(folder: Path) -> None:
    """Make names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock_path(path: Path) -> Path:
    return path.with_suffix(".lock")
