"""Group commits of a journal: the rows of many callers in one transaction, and what is open, waiting or full after it.

Invariant: a row whose answer is not an error is on the disk, once; a row whose answer is an error has no effect.
"""

import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from uuid import UUID

import structlog

from loraplex.tenants.errors import JournalFull, JournalUnavailable, JournalUnreadable
from loraplex.tenants.ledger.journal.file import JournalFile, JournalRows
from loraplex.tenants.ledger.journal.records import usage_text
from loraplex.tenants.quotas.reservation import NOTHING_USED, SettledUsage

# Ages of waiting records are exact to this.
AGE_STEP_S: Final = 1.0
# How often the disk is looked at, so that what would be refused is known before it is.
LOOK_S: Final = 1.0
DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# Errors of one row or statement. Others mean that the disk or the file fails.
OF_A_ROW: Final = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError)
# The size of an admission, with a margin, when there is none to measure.
ANOTHER: Final = JournalRows([("admission", 0, None, " " * 2048)], admissions=1)
LOG = structlog.get_logger("loraplex.journal")


class JournalRecorder:
    """Receives what a journal does; this one ignores it. Times in seconds."""

    def committed(self, rows: int, seconds: float) -> None:
        """Record one transaction for so many callers."""

    def failed(self) -> None:
        """Record one failure of the disk or the file."""

    def moved_aside(self) -> None:
        """Record one file that could not be read and was renamed."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Write an admission, or replace that of the same request."""

    id: UUID
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """Write the end of an open request. The answer is False if it is not open."""

    id: UUID
    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Replace the last progress of open requests."""

    usages: Mapping[UUID, SettledUsage]


Write: TypeAlias = Admit | End | Progress


class StagedRows:
    """The rows of one transaction and what it changes about the open requests, decided before it runs."""

    def __init__(self, position: int, open_requests: Mapping[UUID, int]) -> None:
        self.position = position
        self.rows = JournalRows()
        self.changes: dict[UUID, int | None] = {}
        self._open = open_requests

    def add(self, write: Write) -> bool | None:
        """Add the rows of a write and return the answer of its caller."""
        match write:
            case Admit(id, text):
                if (replaced := self._position_of(id)) is not None:
                    self.rows.replace(replaced)
                self.rows.admit(self._next(), text)
                self.changes[id] = self.position
            case End(id, text):
                if (admission := self._position_of(id)) is None:
                    return False
                self.rows.end(self._next(), admission, text)
                self.changes[id] = None
                return True
            case Progress(usages):
                for each, usage in usages.items():
                    if (admission := self._position_of(each)) is not None:
                        self.rows.progress(admission, usage_text(usage))
        return None

    def _position_of(self, id: UUID) -> int | None:
        return self.changes[id] if id in self.changes else self._open.get(id)

    def _next(self) -> int:
        self.position += 1
        return self.position


class JournalCommits:
    """Commits to one journal, from one thread; other threads may read the public attributes.

    `bytes`: on the disk, those of the write-ahead log included; `dead_letters`: records that PostgreSQL rejected. `open_file` is
    called again after a failure. `full`: why an admission would be refused now, `failure`: why nothing can be
    written; both as of `LOOK_S` ago at most.
    """

    def __init__(self, open_file: Callable[[], JournalFile], recorder: JournalRecorder) -> None:
        self.position = 0
        self.shipped = 0
        self.bytes = 0
        self.dead_letters = 0
        self.full: JournalFull | None = None
        self.failure: str | None = None
        self.has_spare_pages = True
        self._open_file = open_file
        self._recorder = recorder
        self._open: dict[UUID, int] = {}
        self._file: JournalFile | None = None
        self._uncertain: StagedRows | None = None
        self._refused: list[UUID] = []
        self._ended: set[UUID] = set()
        self._looked_at_s = 0.0
        self._unshipped_since: deque[tuple[int, float]] = deque()

    def load(self) -> None:
        """Open the file and read all of it. Raises `JournalUnavailable`."""
        try:
            with self._disk() as file:
                file.check()
                self._open = {request.reservation.id: position for position, request in file.open_requests()}
                self.position = file.position
                with suppress(JournalFull):
                    self._make_room(file, 1, ANOTHER)
                self._note(file)
        except JournalUnreadable:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, writes: Sequence[Write]) -> list[bool | None | Exception]:
        """Write together; one answer per write. One that cannot be written fails alone. Without room, admissions fail alone."""
        try:
            return [*self._commit(writes)]
        except (JournalFull, JournalUnavailable) as error:
            others = [each for each in writes if not isinstance(each, Admit)]
            if len(others) in (0, len(writes)):
                return [error for _ in writes]
            answers = iter(self.write(others))
            return [error if isinstance(each, Admit) else next(answers) for each in writes]
        except Exception as error:  # noqa: BLE001 - raised by the caller of the row; one row must not fail the others
            if len(writes) == 1:
                return [error]
            return [answer for each in writes for answer in self.write([each])]

    def call(self, run: Callable[[JournalFile], Any]) -> Any:
        """Run a function with the file. Raises its errors, and `JournalUnavailable`."""
        with self._disk() as file:
            answer = run(file)
            self._note(file)
        self.has_spare_pages = True
        return answer

    def maintain(self, is_idle: bool) -> None:
        """After callers have their answers: empty the log, look for room and, if idle, return free pages.

        After a failure the file is opened again, and written: what can be opened may still refuse to be written.
        """
        may_shrink = is_idle and self.has_spare_pages and self._file is not None
        is_due = time.monotonic() - self._looked_at_s >= LOOK_S
        if not (is_due or may_shrink or (self._file is not None and self._file.is_checkpoint_due)):
            return
        # Set before the try: a disk that stays away is looked at as seldom as a good one.
        self._looked_at_s = time.monotonic() if is_due else self._looked_at_s
        # What is raised is kept: in `full` and `failure`, and as a file that the next call opens again.
        with suppress(JournalFull, JournalUnavailable), self._disk() as file:
            file.checkpoint_if_due()
            if may_shrink:
                self.has_spare_pages = file.shrink(len(self._open))
            self.bytes = file.bytes
            if is_due:
                if self.failure is not None:
                    file.touch()
                    self.failure = None
                self._make_room(file, 1, ANOTHER)

    def oldest_unshipped_s(self) -> float:
        """Age of the oldest record that is not in PostgreSQL; 0 without one."""
        oldest = next(iter(self._unshipped_since.copy()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest[1]

    def _commit(self, writes: Sequence[Write]) -> list[bool | None]:
        with self._disk() as file:
            staged = StagedRows(self.position, self._open)
            answers = [self._repeats_end(each) or staged.add(each) for each in writes]
            began = time.perf_counter()
            if staged.rows.admissions:
                self._make_room(file, staged.rows.admissions, staged.rows)
            self._write_rows(file, staged)
            self._recorder.committed(len(writes), time.perf_counter() - began)
            return answers

    def _repeats_end(self, write: Write) -> bool:
        """Whether a write is an end that is in the file already, though its caller got an error."""
        if not isinstance(write, End) or write.id not in self._ended:
            return False
        self._ended.discard(write.id)
        return True

    def _write_rows(self, file: JournalFile, staged: StagedRows) -> None:
        self._uncertain = staged
        try:
            file.write(staged.rows)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL or not staged.rows.admissions:
                raise
            self._uncertain = None
            self.full = JournalFull("the disk of this server's usage journal is full; try again later")
            raise self.full from error
        except OF_A_ROW:
            self._uncertain = None
            raise
        self.failure = None
        self._apply(staged)
        self._note(file)

    def _apply(self, staged: StagedRows) -> None:
        self._uncertain = None
        self.position = staged.position
        for id, position in staged.changes.items():
            if position is None:
                self._open.pop(id, None)
            else:
                self._open[id] = position

    def _make_room(self, file: JournalFile, admissions: int, rows: JournalRows) -> None:
        try:
            file.make_room(len(self._open) + admissions, rows)
        except JournalFull as error:
            self.full = error
            raise
        self.full = None

    @contextmanager
    def _disk(self) -> Iterator[JournalFile]:
        """The file, opened again after a failure. A failure of the disk raises `JournalUnavailable`."""
        try:
            if self._file is None:
                self._file = self._open_file()
                self._decide(self._file)
            yield self._file
        except OF_A_ROW:
            raise
        except (sqlite3.DatabaseError, OSError) as error:
            self._recorder.failed()
            if self.failure is None:
                LOG.error("journal_unavailable", error=str(error))
            self.failure = f"this server's usage journal cannot be used: {error}"
            self.close()
            code = error.sqlite_errorcode if isinstance(error, sqlite3.DatabaseError) else 0
            kind = JournalUnreadable if code & 0xFF in DAMAGED else JournalUnavailable
            raise kind(self.failure) from error

    def _decide(self, file: JournalFile) -> None:
        """Whether the transaction that failed is in the file is known now. Its callers were refused, so its admissions are
        cancelled. Its ends are true, and their callers will repeat them.
        """
        staged, self._uncertain = self._uncertain, None
        if staged is not None and file.position > self.position:
            self._apply(staged)
            self._refused += [id for id, position in staged.changes.items() if position is not None]
            self._ended.update(id for id, position in staged.changes.items() if position is None)
        if cancelled := [id for id in self._refused if id in self._open]:
            ends = StagedRows(self.position, self._open)
            for id in cancelled:
                ends.add(End(id, usage_text(NOTHING_USED)))
            self._uncertain = ends
            file.write(ends.rows)
            self._apply(ends)
        self._refused.clear()

    def _note(self, file: JournalFile) -> None:
        """Note the state of the file for other threads and, once a second, since when records wait."""
        self.shipped, self.dead_letters, self.bytes = file.shipped, file.dead_letter_count, file.bytes
        since, now = self._unshipped_since, time.monotonic()
        while since and since[0][0] <= self.shipped:
            since.popleft()
        if self.position > self.shipped and (not since or now - since[-1][1] >= AGE_STEP_S):
            since.append((self.position, now))
