"""The one thread that writes a journal: what arrives while a transaction runs goes together into the next one.

Invariant: a caller has its answer after the commit of its row, and commands take effect in the order of their calls.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import structlog

from loraplex.tenants.ledger.journal.commits import LOOK_S, JournalCommits, Write
from loraplex.tenants.ledger.journal.file import JournalFile

MAX_ROWS: Final = 256
# Between two steps that return free pages to the disk.
SHRINK_PAUSE_S: Final = 0.02
LOG = structlog.get_logger("loraplex.journal")


@dataclass(frozen=True, slots=True)
class Call:
    """Run a function with the file, after the rows that arrived before it."""

    run: Callable[[JournalFile], Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the file and end the thread, after all that arrived before."""


Command: TypeAlias = Write | Call | Stop


@dataclass(frozen=True, slots=True)
class Waiting:
    """A command and its caller."""

    command: Command
    future: asyncio.Future[Any]


class JournalWriter:
    """Runs commands for callers of the event loop that made it."""

    def __init__(self, commits: JournalCommits) -> None:
        self._commits = commits
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        self._busy_since: float | None = None
        # A daemon: a process that cannot start must be able to end.
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    async def start(self) -> None:
        """Open the file. Raises `JournalUnavailable`."""
        await asyncio.to_thread(self._commits.load)
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """For how long the disk has not finished what the thread gave it; 0 while the thread waits for commands."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, command: Command) -> asyncio.Future[Any]:
        """Queue a command. A caller that goes away does not remove it."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._commands.put(Waiting(command, future))
        return future

    def _run(self) -> None:
        while True:
            self._busy_since = None
            waiting = self._next()
            self._busy_since = time.monotonic()
            self._write([each for each in waiting if isinstance(each.command, Write)])
            for each in waiting:
                if isinstance(each.command, Call):
                    self._call(each.command, each.future)
                elif isinstance(each.command, Stop):
                    self._commits.close()
                    self._answer([(each.future, None)])
                    return
            self._maintain()

    def _maintain(self) -> None:
        try:
            self._commits.maintain(is_idle=self._commands.empty())
        except Exception:
            LOG.exception("journal_maintenance_failed")

    def _next(self) -> list[Waiting]:
        """Wait for commands; an empty list when it is time for maintenance."""
        commits = self._commits
        pause = SHRINK_PAUSE_S if commits.has_spare_pages and commits.failure is None else LOOK_S
        try:
            waiting = [self._commands.get(timeout=pause)]
        except queue.Empty:
            return []
        while len(waiting) < MAX_ROWS and not self._commands.empty():
            waiting.append(self._commands.get_nowait())
        return waiting

    def _write(self, waiting: Sequence[Waiting]) -> None:
        if writes := [each.command for each in waiting if isinstance(each.command, Write)]:
            answers = self._commits.write(writes)
            self._answer([(each.future, answer) for each, answer in zip(waiting, answers, strict=True)])

    def _call(self, call: Call, future: asyncio.Future[Any]) -> None:
        try:
            answer = self._commits.call(call.run)
        except Exception as error:  # noqa: BLE001 - raised by the caller
            answer = error
        self._answer([(future, answer)])

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
