"""Locks of a data directory, which decide its owner, and the file by which other processes find its servers.

Invariant: at most one process owns a data directory. The locks belong to open files (flock), so a killed process releases
them at once.
"""

import fcntl
import os
import time
from pathlib import Path

import msgspec

from loraplex.platform.datastores.embedded.errors import DataDirUnusable


class ConnectionFacts(msgspec.Struct, frozen=True):
    """Addresses that another process needs to attach; `transient` owners are commands that end soon."""

    owner_pid: int
    transient: bool
    database_url: str
    redis_url: str
    short_folder: str | None


class OwnerLock:
    """Two locks of one folder: `owner` (exclusive, as long as the owner lives) and `guests` (shared, one per guest)."""

    def __init__(self, folder: Path) -> None:
        self._owner_path = folder / "owner.lock"
        self._guests_path = folder / "guests.lock"
        self._facts_path = folder / "services.json"
        self._descriptor: int | None = None
        self._is_owned = False

    def try_own(self) -> bool:
        """Become the owner; True also if this is the owner already."""
        self._is_owned = self._is_owned or self._acquire(self._owner_path, fcntl.LOCK_EX)
        return self._is_owned

    def try_join(self, facts: ConnectionFacts) -> bool:
        """Join as a guest, which keeps the owner of `facts` from stopping; False when it is already stopping."""
        if not self._acquire(self._guests_path, fcntl.LOCK_SH):
            return False
        if self.facts() == facts:
            return True
        self.release()
        return False

    def wait_for_guests(self, seconds: float) -> None:
        """Wait until the last guest has left, at most `seconds`. The owner calls this after `withdraw`."""
        deadline = time.monotonic() + seconds
        descriptor = open_private(self._guests_path)
        try:
            while not try_flock(descriptor, fcntl.LOCK_EX) and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            os.close(descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor, self._is_owned = None, False

    def facts(self) -> ConnectionFacts | None:
        try:
            return msgspec.json.decode(self._facts_path.read_bytes(), type=ConnectionFacts)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise DataDirUnusable(f"{self._facts_path} is damaged; remove it: {error}") from error

    def publish(self, facts: ConnectionFacts) -> None:
        fresh = self._facts_path.with_suffix(".new")
        with os.fdopen(open_private(fresh, os.O_TRUNC), "wb") as file:
            file.write(msgspec.json.encode(facts))
        fresh.replace(self._facts_path)

    def withdraw(self) -> None:
        self._facts_path.unlink(missing_ok=True)

    def _acquire(self, path: Path, kind: int) -> bool:
        descriptor = open_private(path)
        if try_flock(descriptor, kind):
            self._descriptor = descriptor
            return True
        os.close(descriptor)
        return False


def open_private(path: Path, flags: int = 0) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        raise DataDirUnusable(f"{path} cannot be opened: {error}") from error


def try_flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
