"""A disk in memory for SQLite, which keeps what was synced, and of the rest what chance leaves: some writes, some torn.

Invariant: only `reboot` loses anything, and never what a completed sync covered. An unlinked file may come back.
"""

import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import apsw

SECTOR = 512


class Edit(Protocol):
    """A change of a file; `torn` is a part of it."""

    def apply(self, content: bytearray) -> None: ...

    def torn(self, chance: random.Random) -> "Edit": ...


@dataclass(frozen=True)
class Written:
    """Data at an offset."""

    data: bytes
    offset: int

    def apply(self, content: bytearray) -> None:
        end = self.offset + len(self.data)
        content.extend(bytes(max(0, end - len(content))))
        content[self.offset : end] = self.data

    def torn(self, chance: random.Random) -> "Edit":
        """One of its sectors, or its beginning."""
        begin = chance.randrange(0, len(self.data), SECTOR) if len(self.data) > SECTOR else 0
        return Written(self.data[begin : begin + SECTOR], self.offset + begin)


@dataclass(frozen=True)
class Truncated:
    """The first bytes of a file."""

    size: int

    def apply(self, content: bytearray) -> None:
        del content[self.size :]

    def torn(self, chance: random.Random) -> "Edit":
        return self


@dataclass
class StoredFile:
    """`content`: what a process reads. `durable`: what was synced. `edits`: everything since. `is_new`: never synced."""

    content: bytearray = field(default_factory=bytearray)
    is_new: bool = True
    durable: bytes = b""
    edits: list[Edit] = field(default_factory=list)

    def apply(self, edit: Edit) -> None:
        edit.apply(self.content)
        self.edits.append(edit)

    def sync(self) -> None:
        self.durable, self.is_new = bytes(self.content), False
        self.edits.clear()


class CrashingDisk:
    """Files by name. `operations` counts writes, truncations, syncs and deletions.

    `off_at`: the power fails during that operation. `fails_at`: that operation, once, is an I/O error. `at_sync`: which of
    them the next sync is. `capacity`: bytes of all files, beyond which the disk is full.
    """

    def __init__(self) -> None:
        self.files: dict[str, StoredFile] = {}
        self.unlinked: dict[str, StoredFile] = {}
        self.operations = 0
        self.off_at: int | None = None
        self.fails_at: int | None = None
        self.is_off = False
        self.has_failed = False
        self.capacity: int | None = None
        self.at_sync: Literal["off_at", "fails_at"] | None = None
        self._vfs = _DiskVFS(f"crashing-{id(self)}", self)

    def connect(self, path: Path) -> "DiskConnection":
        """Open a file, as `sqlite3.connect`."""
        return DiskConnection(self._vfs.name, path)

    @property
    def size(self) -> int:
        return sum(len(file.content) for file in self.files.values())

    def operate(self, action: Callable[[], None]) -> None:
        """Run an operation, or fail in it: then it may have been done, and not be synced."""
        self.operations += 1
        if self.is_off:
            raise apsw.IOError("power lost")
        action()
        self.has_failed |= self.operations in (self.off_at, self.fails_at)
        if self.operations == self.off_at:
            self.is_off = True
            raise apsw.IOError("power lost")
        if self.operations == self.fails_at:
            raise apsw.IOError("disk error")

    def edit(self, name: str, edit: Edit) -> None:
        self.operate(lambda: self.files[name].apply(edit))

    def write(self, name: str, data: bytes, offset: int) -> None:
        """Write, unless the disk is full."""
        growth = offset + len(data) - len(self.files[name].content)
        if self.capacity is not None and growth > 0 and self.size + growth > self.capacity:
            raise apsw.FullError("disk full")
        self.edit(name, Written(data, offset))

    def sync(self, name: str) -> None:
        """Sync a file, unless it fails. With a file that was never synced, SQLite syncs the folder."""
        is_new = self.files[name].is_new
        if self.at_sync is not None:
            setattr(self, self.at_sync, self.operations + 1)
            self.at_sync = None

        def sync() -> None:
            if self.operations in (self.off_at, self.fails_at):
                return
            self.files[name].sync()
            if is_new:
                self.unlinked.clear()

        self.operate(sync)

    def unlink(self, name: str, sync_folder: bool) -> None:
        """Unlink a file; it may come back, unless the folder is synced."""

        def unlink() -> None:
            self.unlinked[name] = self.files.pop(name)
            if sync_folder and self.operations not in (self.off_at, self.fails_at):
                self.unlinked.clear()

        self.operate(unlink)

    def reboot(self, chance: random.Random) -> None:
        """Lose what was not synced, but for what chance leaves of it, in sectors."""
        for name, file in self.unlinked.items():
            if name not in self.files and chance.random() < 0.5:
                self.files[name] = file
        for file in self.files.values():
            survived = bytearray(file.durable)
            for edit in file.edits:
                if chance.random() < 0.5:
                    edit.apply(survived)
                elif chance.random() < 0.5:
                    edit.torn(chance).apply(survived)
            file.content, file.durable, file.edits = survived, bytes(survived), []
        self.unlinked.clear()
        self.is_off, self.off_at, self.fails_at = False, None, None


class _OpenFile:
    """One open file, as SQLite uses it."""

    def __init__(self, disk: CrashingDisk, name: str) -> None:
        self._disk = disk
        self._name = name
        disk.files.setdefault(name, StoredFile())

    def xRead(self, amount: int, offset: int) -> bytes:
        return bytes(self._disk.files[self._name].content[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.write(self._name, bytes(data), offset)

    def xTruncate(self, size: int) -> None:
        self._disk.edit(self._name, Truncated(size))

    def xSync(self, flags: int) -> None:
        self._disk.sync(self._name)

    def xFileSize(self) -> int:
        return len(self._disk.files[self._name].content)

    def xLock(self, level: int) -> None: ...

    def xUnlock(self, level: int) -> None: ...

    def xCheckReservedLock(self) -> bool:
        return False

    def xFileControl(self, op: int, pointer: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return SECTOR

    def xDeviceCharacteristics(self) -> int:
        return 0

    def xClose(self) -> None: ...


class _DiskVFS(apsw.VFS):
    """Opens the files of one disk for SQLite."""

    def __init__(self, name: str, disk: CrashingDisk) -> None:
        super().__init__(name, "")
        self.name = name
        self._disk = disk

    def xOpen(self, name: Any, flags: list[int]) -> Any:
        return _OpenFile(self._disk, name.filename() if hasattr(name, "filename") else name)

    def xDelete(self, name: str, sync_folder: bool) -> None:
        self._disk.unlink(name, sync_folder)

    def xAccess(self, name: str, flags: int) -> bool:
        return name in self._disk.files


class DiskConnection:
    """A connection to a file on the disk with the interface and the errors of `sqlite3.Connection`."""

    def __init__(self, vfs: str, path: Path) -> None:
        with translated_errors():
            self._connection = apsw.Connection(str(path), vfs=vfs)

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> "Rows":
        with translated_errors():
            return Rows([*self._connection.execute(sql, tuple(parameters))])

    def close(self) -> None:
        with suppress(apsw.Error):
            self._connection.close()


@dataclass(frozen=True)
class Rows:
    """The rows of one statement."""

    rows: list[Any]

    def fetchall(self) -> list[Any]:
        return self.rows


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise the errors of SQLite as `sqlite3` does."""
    try:
        yield
    except apsw.Error as error:
        damaged = isinstance(error, apsw.CorruptError | apsw.NotADBError)
        kind = sqlite3.DatabaseError if damaged else sqlite3.OperationalError
        translated = kind(str(error))
        # An error that the disk raised has no code.
        raised = {apsw.IOError: sqlite3.SQLITE_IOERR, apsw.FullError: sqlite3.SQLITE_FULL}
        translated.sqlite_errorcode = getattr(error, "result", None) or raised[type(error)]
        raise translated from error
