"""What a journal must contain after a sequence of writes, as plain values: the oracle of its crash tests."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from loraplex.tenants.ledger.journal.commits import Admit, End, JournalCommits, Progress, Write
from loraplex.tenants.ledger.journal.file import JournalFile
from loraplex.tenants.ledger.journal.records import (
    Admitted,
    DeadLetter,
    Ended,
    JournalRecord,
    OpenRequest,
    read_reservation,
    read_usage,
)
from loraplex.tenants.quotas.reservation import NOTHING_USED, Reservation, SettledUsage


@dataclass(frozen=True)
class JournalContent:
    """What a journal returns to its reader."""

    unshipped: list[JournalRecord]
    open_requests: list[OpenRequest]
    rejected: list[JournalRecord]


def content_of(commits: JournalCommits) -> JournalContent:
    """Read a journal."""

    def read(file: JournalFile) -> JournalContent:
        letters: list[DeadLetter] = file.dead_letters()
        return JournalContent(
            unshipped=file.unshipped(1000),
            open_requests=[request for _, request in file.open_requests()],
            rejected=[letter.record for letter in letters],
        )

    content: JournalContent = commits.call(read)
    return content


@dataclass
class JournalModel:
    """The records of a journal that are not forgotten, by position."""

    position: int = 0
    shipped: int = 0
    admissions: dict[int, Reservation] = field(default_factory=dict)
    ends: dict[int, tuple[int, SettledUsage]] = field(default_factory=dict)
    progress: dict[int, SettledUsage] = field(default_factory=dict)
    rejected: set[int] = field(default_factory=set)

    @property
    def open(self) -> dict[UUID, int]:
        ended = {admission for admission, _ in self.ends.values()}
        return {each.id: position for position, each in self.admissions.items() if position not in ended}

    @property
    def content(self) -> JournalContent:
        records = self._records()
        return JournalContent(
            unshipped=[records[position] for position in sorted(records) if position > self.shipped],
            open_requests=[
                OpenRequest(self.admissions[position], self.progress.get(position, NOTHING_USED))
                for position in sorted(self.open.values())
            ],
            rejected=[records[position] for position in sorted(self.rejected)],
        )

    def after(self, *changes: "Callable[[JournalModel], object]") -> "JournalModel":
        """A copy after some changes."""
        changed = copy.deepcopy(self)
        for change in changes:
            change(changed)
        return changed

    def write(self, writes: Sequence[Write]) -> list[bool | None]:
        return [self._write_one(each) for each in writes]

    def _write_one(self, write: Write) -> bool | None:
        if isinstance(write, Admit):
            replaced = self.open.get(write.id, 0)
            self.admissions.pop(replaced, None)
            self.rejected.discard(replaced)
            self.position += 1
            self.admissions[self.position] = read_reservation(write.text)
        elif isinstance(write, End):
            admission = self.open.get(write.id)
            if admission is None:
                return False
            self.position += 1
            self.ends[self.position] = (admission, read_usage(write.text))
            return True
        elif isinstance(write, Progress):
            for id, usage in write.usages.items():
                if id in self.open:
                    self.progress[self.open[id]] = usage
        return None

    def ship(self, position: int) -> None:
        self.shipped = max(self.shipped, position)
        for end, (admission, _) in [*self.ends.items()]:
            if end <= self.shipped and end not in self.rejected:
                del self.ends[end], self.admissions[admission]
                self.progress.pop(admission, None)
                self.rejected.discard(admission)

    def reject(self, position: int) -> None:
        self.rejected.add(position)

    def _records(self) -> dict[int, JournalRecord]:
        admitted = {position: Admitted(position, each) for position, each in self.admissions.items()}
        ended = {
            position: Ended(position, self.admissions[admission], usage)
            for position, (admission, usage) in self.ends.items()
        }
        return {**admitted, **ended}
