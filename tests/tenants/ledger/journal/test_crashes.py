"""A journal on a disk that loses what was not synced: whatever was acknowledged is there after a crash, once and in order.

A crash, or a single I/O error after which the process goes on, comes at every operation of a fixed program.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from uuid import UUID

import pytest
from tests.tenants.ledger.journal.crashing_journal import CrashingJournal
from tests.tenants.ledger.journal.fixtures import progressed, reservation, used

from loraplex.tenants.errors import JournalUnavailable
from loraplex.tenants.ledger.journal.commits import Admit, End, Progress
from loraplex.tenants.ledger.journal.records import reservation_text, usage_text


def program(journal: CrashingJournal, chance: random.Random) -> Iterator[None]:
    """Everything that a journal does, in a fixed order."""
    requests = [reservation(UUID(int=n)) for n in range(1, 13)]
    admits = [Admit(each.id, reservation_text(each)) for each in requests]
    ends = [End(each.id, usage_text(used(n))) for n, each in enumerate(requests)]
    for writes in (admits[:3], [*admits[3:6], ends[0]], [Progress({requests[1].id: progressed(5)}), ends[2]]):
        journal.write(*writes, chance=chance)
        yield
    again = reservation(requests[3].id, epoch=9)
    journal.write(Admit(again.id, reservation_text(again)), ends[4], chance=chance)
    yield
    waiting = [record.position for record in journal.model.content.unshipped]
    journal.reject(waiting[-1], chance)
    yield
    journal.ship(waiting[-2], chance)
    yield
    journal.write(*admits[6:], Progress({each.id: progressed(6) for each in requests}), chance=chance)
    yield
    journal.write(*ends, chance=chance)
    yield
    journal.ship(journal.model.position, chance)
    yield


def operations_of_program() -> int:
    journal = CrashingJournal.started()
    before = journal.disk.operations
    for _ in program(journal, random.Random(0)):
        journal.check()
    journal.close()
    return journal.disk.operations - before


@pytest.mark.parametrize("fault", ["off_at", "fails_at"])
def test_a_fault_at_every_operation_loses_nothing(fault: str) -> None:
    last = operations_of_program()
    assert last > 50
    for operation in range(1, last + 1):
        journal = CrashingJournal.started()
        setattr(journal.disk, fault, journal.disk.operations + operation)
        chance = random.Random(operation)
        for _ in program(journal, chance):
            assert journal.commits.position == journal.model.position
        journal.check()
        journal.crash(chance)
        journal.check()
        journal.close()


def test_a_crash_at_every_operation_of_the_first_start_leaves_an_empty_journal() -> None:
    whole = CrashingJournal.started()
    whole.close()
    for operation in range(1, whole.disk.operations + 1):
        journal = CrashingJournal()
        journal.disk.off_at = operation
        with suppress(JournalUnavailable):
            journal.load()
        journal.crash(random.Random(operation))
        journal.check()
        journal.close()
