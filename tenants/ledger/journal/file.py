"""The SQLite file of a journal: its format, its transactions and the room in it. One thread at a time uses it.

Invariant: what a returned write contains survives a crash of the machine. Before an admission is written, the file has pages
on the disk for the last progress and the end of every open request (https://www.sqlite.org/wal.html).
"""

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from loraplex.tenants.errors import JournalFull, JournalUnreadable
from loraplex.tenants.ledger.journal.records import (
    DeadLetter,
    JournalRecord,
    OpenRequest,
    read_reservation,
    read_usage,
    record_of,
)
from loraplex.tenants.ledger.journal.statements import (
    DEAD_LETTERS,
    EXCLUSIVE,
    FORGET,
    FORMAT,
    LAST_POSITION,
    OPEN_REQUESTS,
    PAGE_BYTES,
    PRAGMAS,
    RECORDS,
    REJECT,
    SCHEMA,
    VIEWS,
    WRITE,
)

FRAME_BYTES: Final = PAGE_BYTES + 24
# The end of a request, with every limit that it met and what its phases waited for, and its last progress, as text.
OPEN_REQUEST_BYTES: Final = 4 * 1024
# Positions that one transaction forgets, which bounds the pages it changes.
FORGET_STEP: Final = 256
MAX_REASON: Final = 500
MIN_FREE_BYTES: Final = 64 << 20
ROWS_AT_ONCE: Final = 1000

Row: TypeAlias = tuple[Any, ...]


class Cursor(Protocol):
    """The rows of one statement."""

    def fetchall(self) -> list[Any]: ...


class Connection(Protocol):
    """A connection in autocommit mode, as `sqlite3.Connection`; raises `sqlite3.Error`."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Cursor: ...

    def close(self) -> None: ...


Connect: TypeAlias = Callable[[Path], Connection]


def connect(path: Path) -> sqlite3.Connection:
    """Open a file in autocommit mode, for whichever thread uses it."""
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """Sizes of a journal. The file and its write-ahead log have `base_pages` each from the start, and the file grows by
    `growth_pages`. `spare_pages` are for what no admission reserves: splits of pages, rejections. `min_free_bytes`: of the
    disk, below which nothing is admitted.
    """

    max_bytes: int
    base_pages: int = 1024
    growth_pages: int = 256
    checkpoint_pages: int = 512
    spare_pages: int = 128
    min_free_bytes: int = MIN_FREE_BYTES


@dataclass(slots=True)
class JournalRows:
    """The rows of one transaction, as the view `writes` takes them: (kind, position, admission, text), in this order."""

    rows: list[Row] = field(default_factory=list)
    admissions: int = 0
    replaced: int = 0
    _progress: dict[int, int] = field(default_factory=dict)

    def replace(self, position: int) -> None:
        """Remove an admission that another one of its request follows."""
        self.rows.append(("replaced", position, None, None))
        self.replaced += 1

    def admit(self, position: int, reservation: str) -> None:
        """Add an admission."""
        self.rows.append(("admission", position, None, reservation))
        self.admissions += 1

    def end(self, position: int, admission: int, usage: str) -> None:
        """Add the end of an admission."""
        self.rows.append(("end", position, admission, usage))

    def progress(self, admission: int, usage: str) -> None:
        """Replace the last progress of an admission. Of several, only the last is a row: a statement has a bound of values."""
        row: Row = ("progress", None, admission, usage)
        if (first := self._progress.setdefault(admission, len(self.rows))) < len(self.rows):
            self.rows[first] = row
        else:
            self.rows.append(row)

    @property
    def pages(self) -> int:
        """An upper bound of the new pages that the rows take."""
        return 2 + pages_of(sum([len(row[3]) for row in self.rows if isinstance(row[3], str)]))


def pages_of(size: int) -> int:
    """Pages for so many bytes of text; a row may leave a part of its page empty."""
    return -(-size * 5 // (4 * PAGE_BYTES))


class JournalFile:
    """An open file. Every method raises `sqlite3.Error` if the disk fails; then nothing of its call is in the file, or it is
    decided when the file is opened again.
    """

    def __init__(self, path: Path, config: JournalConfig, connect: Connect = connect) -> None:
        self._folder = path.parent
        self._log = Path(f"{path}-wal")
        self._config = config
        self._connection = connect(path)
        self._unwritten_pages = 0
        self._has_log = False
        try:
            self._execute(EXCLUSIVE)
            is_new = self._is_new()
            for pragma in PRAGMAS:
                self._execute(pragma)
            self._execute(f"PRAGMA journal_size_limit = {config.base_pages * FRAME_BYTES}")
            if is_new:
                self._create()
            for statement in VIEWS:
                self._execute(statement)
            self.checkpoint()
            self.position, self.shipped = self._execute(LAST_POSITION)[0]
            self._count_dead_letters()
            self._measure()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the file; its log is emptied."""
        self._connection.close()

    @property
    def bytes(self) -> int:
        """Bytes on the disk, those of the write-ahead log included, as of the last checkpoint."""
        return self._pages * PAGE_BYTES + self._log_bytes

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether the write-ahead log could soon grow beyond its size."""
        return self._unwritten_pages >= self._config.checkpoint_pages

    @property
    def is_drained(self) -> bool:
        """Whether no request is open, unshipped or rejected."""
        return not self._execute("SELECT 1 FROM admissions LIMIT 1")

    def check(self) -> None:
        """Read the whole file. Raises `JournalUnreadable` if any page or row of it is damaged."""
        (result,) = self._execute("PRAGMA quick_check(1)")[0]
        if result != "ok":
            raise JournalUnreadable(f"SQLite finds it damaged: {result}")
        self.open_requests()
        self.dead_letters()
        position = self.shipped
        while records := self._records(position, ROWS_AT_ONCE):
            position = records[-1].position

    def unshipped(self, limit: int) -> list[JournalRecord]:
        """The oldest records that PostgreSQL does not have, in the order of writing."""
        return self._records(self.shipped, limit)

    def open_requests(self) -> list[tuple[int, OpenRequest]]:
        """Requests without an end and their positions, in the order of admission."""
        return [
            (position, OpenRequest(read_reservation(reservation), read_usage(usage)))
            for position, reservation, usage in self._execute(OPEN_REQUESTS)
        ]

    def dead_letters(self) -> list[DeadLetter]:
        """Rejected records, in the order of writing."""
        return [
            DeadLetter(
                record_of(position, read_reservation(reservation), usage), reason, datetime.fromisoformat(at)
            )
            for position, reservation, usage, reason, at in self._execute(DEAD_LETTERS)
        ]

    def write(self, rows: JournalRows) -> None:
        """Write rows in one transaction, which is one statement."""
        if rows.rows:
            values = ", ".join(["(?, ?, ?, ?)"] * len(rows.rows))
            self._execute(WRITE + values, *[value for row in rows.rows for value in row])
        pages = rows.pages
        self._free_pages -= pages
        self._unwritten_pages += pages + len(rows.rows)
        if rows.replaced:
            self._count_dead_letters()

    def touch(self) -> None:
        """Write a page that says what it said before."""
        self._execute(f"PRAGMA user_version = {FORMAT}")
        self._unwritten_pages += 1

    def reject(self, position: int, reason: str) -> None:
        """Keep a record that PostgreSQL rejected; `forget` leaves it."""
        text = reason[:MAX_REASON].encode(errors="replace").decode()
        self._execute(REJECT, position, text, datetime.now(UTC).isoformat())
        self._unwritten_pages += 2
        self._count_dead_letters()

    def forget(self, position: int) -> None:
        """Delete what ended and is in PostgreSQL up to this position."""
        while self.shipped < position:
            step = min(position, self.shipped + FORGET_STEP)
            self._execute(FORGET, self.shipped, step)
            self.shipped = step
            self._unwritten_pages += FORGET_STEP
            self.checkpoint_if_due()
        if self.dead_letter_count:
            self._count_dead_letters()

    def make_room(self, open_requests: int, rows: JournalRows) -> None:
        """Ensure pages on the disk for these rows, and for the end of so many requests. Raises `JournalFull`."""
        if shutil.disk_usage(self._folder).free < self._config.min_free_bytes:
            raise JournalFull(
                f"the disk of this server's usage journal has less than {self._config.min_free_bytes} bytes free; try again later"
            )
        if not self._has_log:
            self._execute("DELETE FROM reserve")
            self._measure()
        if not self._has_log and self._free_pages:
            self._extend_log()
        if self._pages < self._config.base_pages:
            self._grow(self._config.base_pages - self._pages)
            self._has_log = True
        needed = self._needed(open_requests, rows)
        if self._free_pages < needed:
            self._measure()
        while self._free_pages < needed:
            self._grow(self._config.growth_pages)

    def shrink(self, open_requests: int) -> bool:
        """Return some of the free pages to the disk. False: no more than the reserve is left."""
        self._measure()
        spare = self._free_pages - self._needed(open_requests, JournalRows()) - 2 * self._config.growth_pages
        pages = min(spare, self._pages - self._config.base_pages, self._config.growth_pages)
        if pages <= 0:
            return False
        # Moved pages go through the log, too: from its start they fit.
        self.checkpoint()
        self._execute(f"PRAGMA incremental_vacuum({pages})")
        self.checkpoint()
        self._measure()
        return True

    def checkpoint_if_due(self) -> None:
        """Copy the write-ahead log into the file before the log could grow beyond its size."""
        if self.is_checkpoint_due:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Copy the write-ahead log into the file; the next write begins at the start of the log."""
        self._execute("PRAGMA wal_checkpoint(PASSIVE)")
        self._unwritten_pages = 0
        self._measure_log()

    def _records(self, after: int, limit: int) -> list[JournalRecord]:
        rows = self._execute(RECORDS, after, limit)
        # Most requests end soon after their admission: both records have one text of the reservation.
        reservations = {text: read_reservation(text) for text in {row[1] for row in rows}}
        return [record_of(position, reservations[text], usage) for position, text, usage in rows]

    def _needed(self, open_requests: int, rows: JournalRows) -> int:
        return self._config.spare_pages + rows.pages + pages_of(open_requests * OPEN_REQUEST_BYTES)

    def _extend_log(self) -> None:
        """Write the log in its full length, which then stays. It takes free pages, so that emptying it needs no room."""
        written, base = 0, self._config.base_pages
        with self._full_disk(self._pages):
            while written < base:
                pages = min(self._free_pages, base - written)
                self._fill(pages)
                self._execute("DELETE FROM reserve")
                written += pages
            self.checkpoint()
        self._has_log = True

    def _grow(self, pages: int) -> None:
        """Write new pages to the disk and free them within the file. The log has room to undo this."""
        self._measure_log()
        # Free pages are filled before new ones, and all of them pass through the log.
        filled = self._free_pages + pages
        log = max(self._log_bytes, filled * FRAME_BYTES)
        if (self._pages + pages) * PAGE_BYTES + log > self._config.max_bytes:
            raise JournalFull(
                f"this server's usage journal has reached {self._config.max_bytes} bytes; try again later"
            )
        self.checkpoint()
        with self._full_disk(self._pages):
            self._fill(filled)
            self.checkpoint()

    def _fill(self, pages: int) -> None:
        self._execute("INSERT INTO reserve VALUES (zeroblob(?))", pages * PAGE_BYTES)

    @contextmanager
    def _full_disk(self, pages: int) -> Iterator[None]:
        """Free the reserve in any case. If the disk is full, return to so many pages and raise `JournalFull`."""
        try:
            yield
            self._execute("DELETE FROM reserve")
            self._measure()
        except sqlite3.OperationalError as error:
            with suppress(sqlite3.OperationalError):
                self.checkpoint()
            self._execute("DELETE FROM reserve")
            self._measure()
            # Zero would return all free pages.
            if self._pages > pages:
                self._execute(f"PRAGMA incremental_vacuum({self._pages - pages})")
            self.checkpoint()
            self._measure()
            raise JournalFull(
                f"the disk of this server's usage journal has no room ({error}); try again later"
            ) from error

    def _count_dead_letters(self) -> None:
        self.dead_letter_count: int = self._execute("SELECT count(*) FROM rejections")[0][0]

    def _measure(self) -> None:
        self._pages: int = self._execute("PRAGMA page_count")[0][0]
        self._free_pages: int = self._execute("PRAGMA freelist_count")[0][0]
        self._measure_log()

    def _measure_log(self) -> None:
        try:
            self._log_bytes = self._log.stat().st_size
        except FileNotFoundError:
            self._log_bytes = 0

    def _is_new(self) -> bool:
        version = self._execute("PRAGMA user_version")[0][0]
        if version not in (0, FORMAT):
            raise JournalUnreadable(f"it has format {version}, and this release reads format {FORMAT}")
        return bool(version == 0)

    def _create(self) -> None:
        with self._transaction():
            for statement in SCHEMA:
                self._execute(statement)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._execute("ROLLBACK")
            raise

    def _execute(self, sql: str, *parameters: Any) -> list[Any]:
        return self._connection.execute(sql, parameters).fetchall()
