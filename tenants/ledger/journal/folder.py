"""The folder of all journals on one data directory: a file and a lock for each gateway.

Invariant: at most one process has a journal. Locks belong to open files (flock), so a killed process releases them at once.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from uuid import UUID

import structlog

from loraplex.tenants.errors import JournalUnavailable
from loraplex.tenants.ids import canonical_uuid

JOURNAL_FOLDER: Final = "journal"
"""The folder of a data directory."""
SUFFIX: Final = ".sqlite"
UNREADABLE: Final = ".unreadable"
# A journal's write-ahead log is beside it.
LOG_SUFFIX: Final = "-wal"
LOG = structlog.get_logger("loraplex.journal")


class JournalLock:
    """The lock of one gateway's journal, taken. `path`: the journal's file, which only its owner may read."""

    def __init__(self, folder: Path, gateway_id: UUID, descriptor: int) -> None:
        self.gateway_id = gateway_id
        self.path = folder / f"{gateway_id}{SUFFIX}"
        self._descriptor = descriptor

    @classmethod
    def take(cls, folder: Path, gateway_id: UUID) -> "JournalLock | None":
        """Lock a gateway's journal and create the file if there is none. None if another process has it, or has just removed it.

        Raises `JournalUnavailable`.
        """
        try:
            descriptor = _open(_lock_path(folder, gateway_id))
            lock = cls(folder, gateway_id, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.release()
                return None
            if not os.fstat(descriptor).st_nlink:
                # A third process may have a lock of the same name already.
                lock.release()
                return None
            os.close(_open(lock.path))
            sync_folder(folder)
        except OSError as error:
            raise JournalUnavailable(f"the usage journal {gateway_id} cannot be locked: {error}") from error
        return lock

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
        # The file first: without its log it would look readable, and lack what is in the log.
        self.path.replace(aside)
        log = Path(f"{self.path}{LOG_SUFFIX}")
        if log.exists():
            log.replace(f"{aside}{LOG_SUFFIX}")
        sync_folder(self.path.parent)
        self._unlock()
        return aside

    def _unlock(self) -> None:
        _lock_path(self.path.parent, self.gateway_id).unlink(missing_ok=True)
        self.release()


def prepare(folder: Path) -> None:
    """Create the folder of the journals. Raises `JournalUnavailable`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_folder(folder.parent)
    except OSError as error:
        raise JournalUnavailable(f"the folder of the usage journals cannot be used: {error}") from error


def ended_gateways(folder: Path) -> Iterator[JournalLock]:
    """Lock and yield the journals that no process has. The caller releases, removes or moves each.

    A file with another name than a gateway's is left alone, and logged.
    """
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        gateway_id = canonical_uuid(path.stem)
        if gateway_id is None:
            LOG.warning("a file that is no gateway's journal is left alone", file=str(path))
            continue
        lock = JournalLock.take(folder, gateway_id)
        if lock is not None:
            yield lock


def sync_folder(folder: Path) -> None:
    """Make names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock_path(folder: Path, gateway_id: UUID) -> Path:
    return folder / f"{gateway_id}.lock"


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
