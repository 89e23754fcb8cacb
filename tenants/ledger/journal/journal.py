"""The durable local journal of one gateway: what it admitted and what ended, until PostgreSQL has it.

Invariant: a record is on the disk before the call that writes it returns, and leaves it only after `shipped`. See README.md.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, Self
from uuid import UUID

import structlog

from loraplex.tenants.errors import JournalUnavailable, JournalUnreadable
from loraplex.tenants.ledger.journal.commits import Admit, End, JournalCommits, JournalRecorder, Progress
from loraplex.tenants.ledger.journal.file import Connect, JournalConfig, JournalFile, connect
from loraplex.tenants.ledger.journal.folder import JournalLock, ended_gateways, prepare
from loraplex.tenants.ledger.journal.records import (
    DeadLetter,
    JournalRecord,
    OpenRequest,
    reservation_text,
    usage_text,
)
from loraplex.tenants.ledger.journal.writer import MAX_ROWS, Call, Command, JournalWriter, Stop
from loraplex.tenants.quotas.reservation import Reservation, SettledUsage

# Progress is written together, so often that it is at most a second old on the disk.
PROGRESS_S: Final = 0.5
NO_RECORDER: Final = JournalRecorder()
LOG = structlog.get_logger("loraplex.journal")


class Journal:
    """A journal. Methods raise `JournalUnavailable` while its disk fails; then their record is not written.

    `commits` has its sizes and counts, for metrics.
    """

    def __init__(self, lock: JournalLock, commits: JournalCommits) -> None:
        self.gateway_id = lock.gateway_id
        self._lock = lock
        self.commits = commits
        self._writer = JournalWriter(commits)
        self._progress: dict[UUID, SettledUsage] = {}
        self._progress_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        folder: Path,
        gateway_id: UUID,
        *,
        max_bytes: int,
        connect: Connect = connect,
        recorder: JournalRecorder = NO_RECORDER,
    ) -> Self:
        """Create a gateway's journal, or open it. Raises `JournalUnavailable`, also if another process has it."""
        prepare(folder)
        lock = JournalLock.take(folder, gateway_id)
        if lock is None:
            raise JournalUnavailable(f"another process has the usage journal of gateway {gateway_id}")
        try:
            return await cls.open_locked(
                lock, JournalConfig(max_bytes=max_bytes), connect=connect, recorder=recorder
            )
        except JournalUnavailable:
            lock.release()
            raise

    @classmethod
    async def open_locked(
        cls,
        lock: JournalLock,
        config: JournalConfig,
        *,
        connect: Connect = connect,
        recorder: JournalRecorder = NO_RECORDER,
    ) -> Self:
        """Open a journal whose lock is taken, and read all of it. Raises `JournalUnavailable` and leaves the lock."""
        journal = cls(lock, JournalCommits(lambda: JournalFile(lock.path, config, connect), recorder))
        await journal._writer.start()
        return journal

    @property
    def position(self) -> int:
        """The position of the newest record."""
        return self.commits.position

    @property
    def waiting(self) -> int:
        """How many records PostgreSQL does not have yet."""
        return self.commits.position - self.commits.shipped

    @property
    def is_full(self) -> bool:
        """Whether `admit` would raise `JournalFull`, as of a second ago."""
        return self.commits.full is not None

    @property
    def trouble(self) -> str | None:
        """Why `admit` would fail, as of a second ago; None where it would not."""
        full = self.commits.full
        return self.commits.failure if full is None else str(full)

    @property
    def stalled_s(self) -> float:
        """For how long the disk has not finished the transaction in progress, in seconds; 0 without one."""
        return self._writer.busy_s

    async def admit(self, reservation: Reservation) -> None:
        """Write an admission durably, with room for its progress and its end. A repeated one replaces the first.

        Raises `JournalFull` before anything is written. A cancelled call may have written it: `end` it then.
        """
        await self._submit(Admit(reservation.id, reservation_text(reservation)))

    def progress(self, reservation_id: UUID, usage: SettledUsage) -> None:
        """Note what an open request has used; on the disk a second later. Requests that are not open are ignored."""
        self._progress[reservation_id] = usage
        if self._progress_timer is None and not self._is_closed:
            self._progress_timer = asyncio.get_running_loop().call_later(PROGRESS_S, self._write_progress)

    async def end(self, reservation_id: UUID, usage: SettledUsage) -> bool:
        """Write the end of an open request durably; its room was reserved by `admit`. Repeat it after `JournalUnavailable`.

        False if the request is not open: it has ended already, or its admission is not in the journal.
        """
        self._progress.pop(reservation_id, None)
        ended: bool = await self._submit(End(reservation_id, usage_text(usage)))
        return ended

    async def unshipped(self, limit: int) -> Sequence[JournalRecord]:
        """The oldest records that PostgreSQL does not have, in the order of writing."""
        records: Sequence[JournalRecord] = await self._submit(Call(lambda file: file.unshipped(limit)))
        return records

    async def shipped(self, position: int) -> None:
        """Forget the records up to this position: PostgreSQL has them. Open requests stay until they end, and rejected ones."""
        await self._submit(Call(lambda file: file.forget(position)))

    async def reject(self, position: int, reason: str) -> None:
        """Keep an unshipped record as a dead letter, with at most 500 characters of the reason. Call before `shipped`."""
        await self._submit(Call(lambda file: file.reject(position, reason)))

    async def dead_letters(self) -> Sequence[DeadLetter]:
        """The records that PostgreSQL rejected, in the order of writing. A rejected admission is forgotten with its end."""
        letters: Sequence[DeadLetter] = await self._submit(Call(JournalFile.dead_letters))
        return letters

    async def open_requests(self) -> Sequence[OpenRequest]:
        """The requests without an end, with their last progress on the disk."""
        requests = await self._submit(Call(JournalFile.open_requests))
        return [request for _, request in requests]

    async def close(self) -> None:
        """Write what is left and close; may be repeated. The file is deleted if nothing in it is open, unshipped or rejected."""
        if self._is_closed:
            return
        if self._progress_timer is not None:
            self._progress_timer.cancel()
            self._write_progress()
        self._is_closed = True
        is_drained = self._writer.submit(Call(lambda file: file.is_drained))
        await self._writer.submit(Stop())
        if is_drained.exception() is None and is_drained.result():
            self._lock.remove()
        else:
            self._lock.release()

    def _write_progress(self) -> None:
        self._progress_timer = None
        noted, self._progress = [*self._progress.items()], {}
        for first in range(0, len(noted), MAX_ROWS):
            self._writer.submit(Progress(dict(noted[first : first + MAX_ROWS]))).add_done_callback(_ignore)

    async def _submit(self, command: Command) -> Any:
        if self._is_closed:
            raise JournalUnavailable("this server is stopping: its usage journal is closed")
        return await self._writer.submit(command)


async def left_behind(
    folder: Path, *, max_bytes: int, connect: Connect = connect, recorder: JournalRecorder = NO_RECORDER
) -> AsyncIterator[Journal]:
    """Open the journals of gateways that are gone; each is this process's alone until the caller closes it.

    A journal that cannot be read is renamed, logged and counted. Raises `JournalUnavailable`.
    """
    prepare(folder)
    config = JournalConfig(max_bytes=max_bytes)
    for lock in ended_gateways(folder):
        try:
            journal = await Journal.open_locked(lock, config, connect=connect, recorder=recorder)
        except JournalUnreadable as error:
            aside = lock.move_aside()
            recorder.moved_aside()
            LOG.error("journal_moved_aside", file=str(aside), error=str(error))
        except JournalUnavailable:
            lock.release()
            raise
        else:
            yield journal


def _ignore(written: asyncio.Future[Any]) -> None:
    """Progress that could not be written is followed by newer progress; the writer has logged the failure."""
    if not written.cancelled():
        written.exception()
