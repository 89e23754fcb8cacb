"""Any sequence of what a journal does, with crashes, single I/O errors and a full disk at any of its writes.

After each step the journal contains what was acknowledged, once and in order, and of a step that failed all or nothing.
"""

import random
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.tenants.ledger.journal.crashing_journal import CrashingJournal
from tests.tenants.ledger.journal.fixtures import progressed, reservation, used

from loraplex.tenants.ledger.journal.commits import Admit, End, Progress, Write
from loraplex.tenants.ledger.journal.records import reservation_text, usage_text

COUNTS = st.integers(min_value=0, max_value=3)
SEEDS = st.integers(min_value=0, max_value=1 << 32)


class JournalMachine(RuleBasedStateMachine):
    """What a journal does on a disk that works."""

    @initialize()
    def start(self) -> None:
        self.journal = CrashingJournal.started()
        self.chance = random.Random(0)
        self.last_id = 0

    @rule(admissions=COUNTS, ends=COUNTS, progress=COUNTS, repeats=COUNTS, first=st.booleans())
    def write(self, admissions: int, ends: int, progress: int, repeats: int, first: bool) -> None:
        """Admit, end and progress together. A few requests end that are not open any more, or are admitted again."""
        new = [reservation(self._next_id()) for _ in range(admissions)]
        known = [*self.journal.model.open]
        again = [reservation(id, epoch=9) for id in known[:repeats]]
        ended = (known[:ends] if first else known[-ends:]) + [each.id for each in new[:ends]]
        writes: list[Write] = [
            *(Admit(each.id, reservation_text(each)) for each in (*new, *again)),
            Progress({id: progressed(self.last_id) for id in known[:progress]}),
            *(End(id, usage_text(used(self.last_id))) for id in (*ended, *ended[:1])),
        ]
        self.journal.write(*writes, chance=self.chance)

    @rule(count=COUNTS)
    def ship(self, count: int) -> None:
        """Some of what waits is in PostgreSQL."""
        waiting = [record.position for record in self.journal.model.content.unshipped]
        self.journal.ship(waiting[min(count, len(waiting) - 1)] if waiting else 0, self.chance)

    @rule(place=COUNTS)
    def reject(self, place: int) -> None:
        """PostgreSQL rejects one of the records that wait."""
        waiting = [record.position for record in self.journal.model.content.unshipped]
        if place < len(waiting):
            self.journal.reject(waiting[place], self.chance)

    @rule()
    def restart(self) -> None:
        """The process ends as it should, on a disk that works, and another one starts."""
        self.journal.disk.off_at = self.journal.disk.fails_at = None
        self.journal.commits.close()
        self.journal.load()

    @invariant()
    def content_is_what_was_acknowledged(self) -> None:
        self.journal.check()

    def teardown(self) -> None:
        self.journal.close()

    def _next_id(self) -> UUID:
        self.last_id += 1
        return UUID(int=self.last_id)


class FailingDiskMachine(JournalMachine):
    """The same with crashes and single I/O errors."""

    @rule(seed=SEEDS)
    def crash(self, seed: int) -> None:
        self.journal.crash(random.Random(seed))

    @rule(seed=SEEDS, after=st.integers(min_value=1, max_value=40))
    def crash_during(self, seed: int, after: int) -> None:
        """The power fails during one of the next operations."""
        self.chance = random.Random(seed)
        self.journal.disk.off_at = self.journal.disk.operations + after

    @rule(after=st.integers(min_value=1, max_value=40))
    def fail_once(self, after: int) -> None:
        self.journal.disk.fails_at = self.journal.disk.operations + after


class FullDiskMachine(JournalMachine):
    """The same on a disk that is full at times: admissions are refused, and nothing else is."""

    @rule()
    def fill(self) -> None:
        self.journal.disk.capacity = self.journal.disk.size

    @rule()
    def free(self) -> None:
        self.journal.disk.capacity = None


TestFailingDisk = FailingDiskMachine.TestCase
TestFailingDisk.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestFullDisk = FullDiskMachine.TestCase
TestFullDisk.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
