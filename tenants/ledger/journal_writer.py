"""The one thread that writes a journal: what arrives while a transaction runs goes together into the next one.

Invariant: a caller has its answer after the commit of its row, or an error and then its row has no effect.
"""

import asyncio
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from uuid import UUID

import structlog

from loraplex.tenants.errors import JournalFull, JournalUnavailable, JournalUnreadable
from loraplex.tenants.ledger.journal_file import JournalFile, JournalRows
from loraplex.tenants.ledger.journal_records import usage_text
from loraplex.tenants.quotas.reservation import NOTHING_USED, SettledUsage

MAX_ROWS: Final = 256
# How often a full journal looks for room again.
FULL_RETRY_S: Final = 1.0
# Between two steps that return free pages to the disk.
SHRINK_PAUSE_S: Final = 0.02
AGE_STEP_S: Final = 1.0
DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
LOG = structlog.get_logger("loraplex.journal")


class JournalRecorder:
    """Receives what a journal does; this one ignores it. Times in seconds."""

    def committed(self, rows: int, seconds: float) -> None:
        """Record one transaction of so many rows."""

    def failed(self) -> None:
        """Record one transaction that the disk refused."""

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
    """Replace the last progress of open requests, at most `MAX_ROWS`."""

    usages: Mapping[UUID, SettledUsage]


@dataclass(frozen=True, slots=True)
class Call:
    """Run a function with the file, after the rows that arrived before it."""

    run: Callable[[JournalFile], Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the file and end the thread, after all that arrived before."""


Write: TypeAlias = Admit | End | Progress
Command: TypeAlias = Write | Call | Stop


@dataclass(frozen=True, slots=True)
class Waiting:
    """A command and its caller."""

    command: Command
    future: asyncio.Future[Any]


class StagedRows:
    """The rows of one transaction and what it changes about the open requests, decided before it runs."""

    def __init__(self, position: int, open_requests: Mapping[UUID, int]) -> None:
        self.position = position
        self.rows = JournalRows()
        self.changes: dict[UUID, int | None] = {}
        self._open = open_requests

    def add(self, command: Command) -> object:
        """Add the rows of a command and return the answer of its caller."""
        match command:
            case Admit(id, text):
                replaced = self._position_of(id)
                if replaced is not None:
                    self.rows.replaced.append((replaced,))
                self.rows.admissions.append((self._next(), text))
                self.changes[id] = self.position
            case End(id, text):
                admission = self._position_of(id)
                if admission is None:
                    return False
                self.rows.ends.append((self._next(), admission, text))
                self.changes[id] = None
                return True
            case Progress(usages):
                for each, usage in usages.items():
                    if (admission := self._position_of(each)) is not None:
                        self.rows.progress.append((admission, usage_text(usage)))
        return None

    def _position_of(self, id: UUID) -> int | None:
        return self.changes[id] if id in self.changes else self._open.get(id)

    def _next(self) -> int:
        self.position += 1
        return self.position


class JournalWriter:
    """Runs commands in their order, as many as wait in one transaction. Its answers are futures of the loop that starts it."""

    def __init__(self, open_file: Callable[[], JournalFile], recorder: JournalRecorder) -> None:
        self.position = 0
        self.shipped = 0
        self.bytes = 0
        self.dead_letters = 0
        self.full: JournalFull | None = None
        self._open_file = open_file
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        self._open: dict[UUID, int] = {}
        self._file: JournalFile | None = None
        self._uncertain: StagedRows | None = None
        self._has_spare_pages = False
        self._unshipped_since: deque[tuple[int, float]] = deque()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    async def start(self) -> None:
        """Open the file. Raises `JournalUnavailable`."""
        opened = self.submit(Call(self._load))
        self._thread.start()
        try:
            await opened
        except JournalUnavailable:
            await self.submit(Stop())
            raise

    def submit(self, command: Command) -> asyncio.Future[Any]:
        """Queue a command. A caller that goes away does not remove it."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._commands.put(Waiting(command, future))
        return future

    def oldest_unshipped_s(self) -> float:
        """Age of the oldest record that is not in PostgreSQL, to a second; 0 without one."""
        oldest = next(iter(self._unshipped_since.copy()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest[1]

    def _load(self, file: JournalFile) -> None:
        file.check()
        self._open = {request.reservation.id: position for position, request in file.open_requests()}
        self.position, self.shipped = file.position, file.shipped
        try:
            self._make_room(file, len(self._open) + 1, JournalRows())
        except JournalFull as error:
            LOG.warning("journal_full", error=str(error))
        self.bytes = file.bytes

    def _run(self) -> None:
        while True:
            waiting = self._next()
            writes = [each for each in waiting if isinstance(each.command, Write)]
            if writes:
                self._write(writes)
            for each in waiting:
                if isinstance(each.command, Call):
                    self._call(each.command.run, each.future)
            self._maintain()
            if stops := [each.future for each in waiting if isinstance(each.command, Stop)]:
                if self._file is not None:
                    self._file.close()
                self._answer([(future, None) for future in stops])
                return

    def _next(self) -> list[Waiting]:
        """Wait for commands; an empty list when it is time for maintenance."""
        pause = SHRINK_PAUSE_S if self._has_spare_pages else FULL_RETRY_S if self.full else None
        try:
            waiting = [self._commands.get(timeout=pause)]
        except queue.Empty:
            return []
        while len(waiting) < MAX_ROWS and not self._commands.empty():
            waiting.append(self._commands.get_nowait())
        return waiting

    def _write(self, waiting: Sequence[Waiting]) -> None:
        """Write rows together. If one of them cannot be written, or there is no room for admissions, the others are written
        without it.
        """
        try:
            answers = self._commit(waiting)
        except (JournalFull, JournalUnavailable) as error:
            admits = [each for each in waiting if isinstance(each.command, Admit)]
            self._answer([(each.future, error) for each in admits or waiting])
            others = [each for each in waiting if not isinstance(each.command, Admit)]
            if admits and others:
                self._write(others)
        except Exception as error:  # noqa: BLE001 - raised by the caller of the row; one row must not fail the others
            if len(waiting) == 1:
                self._answer([(waiting[0].future, error)])
                return
            for each in waiting:
                self._write([each])
        else:
            self._answer([(each.future, answer) for each, answer in zip(waiting, answers, strict=True)])

    def _commit(self, waiting: Sequence[Waiting]) -> list[object]:
        with self._disk() as file:
            staged = StagedRows(self.position, self._open)
            answers = [staged.add(each.command) for each in waiting]
            began = time.perf_counter()
            if staged.rows.admissions:
                self._make_room(file, len(self._open) + len(staged.rows.admissions), staged.rows)
            self._write_rows(file, staged)
            self._recorder.committed(len(waiting), time.perf_counter() - began)
            return answers

    def _write_rows(self, file: JournalFile, staged: StagedRows) -> None:
        self._uncertain = staged
        try:
            file.write(staged.rows)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL or not staged.rows.admissions:
                raise
            self._uncertain = None
            self.full = JournalFull("the disk of this server's usage journal is full")
            raise self.full from error
        self._apply(staged)

    def _apply(self, staged: StagedRows) -> None:
        self._uncertain = None
        self.position = staged.position
        for id, position in staged.changes.items():
            if position is None:
                self._open.pop(id, None)
            else:
                self._open[id] = position
        self._note_position()

    def _make_room(self, file: JournalFile, open_requests: int, rows: JournalRows) -> None:
        try:
            file.make_room(open_requests, rows)
        except JournalFull as error:
            self.full = error
            raise
        self.full = None

    def _call(self, run: Callable[[JournalFile], Any], future: asyncio.Future[Any]) -> None:
        try:
            with self._disk() as file:
                answer = run(file)
                self.shipped, self.dead_letters = file.shipped, file.count_dead_letters()
                self._has_spare_pages = True
        except Exception as error:  # noqa: BLE001 - raised by the caller
            answer = error
        self._note_position()
        self._answer([(future, answer)])

    def _maintain(self) -> None:
        """After callers have their answers: empty the log, look for room if there was none, and return free pages."""
        if self._file is None:
            return
        # Both are kept: in `full` and, for the next command, as a file to open again.
        with suppress(JournalFull, JournalUnavailable), self._disk() as file:
            file.checkpoint_if_due()
            if self._commands.empty() and self._has_spare_pages:
                self._has_spare_pages = file.shrink(len(self._open))
            if self.full is not None:
                self._make_room(file, len(self._open) + 1, JournalRows())
            self.bytes = file.bytes

    @contextmanager
    def _disk(self) -> Iterator[JournalFile]:
        """The file, opened again after a failure. A failing disk raises `JournalUnavailable`, or `JournalFull` for admissions."""
        try:
            if self._file is None:
                self._file = self._open_file()
                self._decide(self._file)
            yield self._file
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.IntegrityError | sqlite3.DataError | sqlite3.ProgrammingError):
                raise
            self._fail(error)
            damaged = error.sqlite_errorcode & 0xFF in DAMAGED
            kind = JournalUnreadable if damaged else JournalUnavailable
            raise kind(f"this server's usage journal cannot be used: {error}") from error

    def _decide(self, file: JournalFile) -> None:
        """Whether the transaction of the failure is in the file is known now. Its callers were refused, so its admissions are
        cancelled.
        """
        staged = self._uncertain
        if staged is None or file.position < staged.position or staged.position == self.position:
            return
        self._apply(staged)
        admitted = [id for id, position in staged.changes.items() if position is not None]
        cancelled = StagedRows(self.position, self._open)
        for id in admitted:
            cancelled.add(End(id, usage_text(NOTHING_USED)))
        file.write(cancelled.rows)
        self._apply(cancelled)

    def _fail(self, error: sqlite3.Error) -> None:
        self._recorder.failed()
        LOG.error("journal_unavailable", error=str(error))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _note_position(self) -> None:
        """Note when records were first waiting, once a second."""
        since, now = self._unshipped_since, time.monotonic()
        while since and since[0][0] <= self.shipped:
            since.popleft()
        if self.position > self.shipped and (not since or now - since[-1][1] >= AGE_STEP_S):
            since.append((self.position, now))

    def _answer(self, answers: Sequence[tuple[asyncio.Future[Any], object]]) -> None:
        self._loop.call_soon_threadsafe(_resolve, answers)


def _resolve(answers: Sequence[tuple[asyncio.Future[Any], object]]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
