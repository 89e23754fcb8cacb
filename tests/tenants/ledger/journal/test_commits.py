"""After a failure of the disk it is unknown whether its transaction is in the file; the next call finds out and goes on."""

from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import pytest
from structlog.testing import capture_logs
from tests.tenants.ledger.journal.crashing_journal import CrashingJournal
from tests.tenants.ledger.journal.fixtures import reservation, used

from loraplex.tenants.errors import JournalUnavailable
from loraplex.tenants.ledger.journal import commits
from loraplex.tenants.ledger.journal.commits import Admit, End, JournalCommits, JournalRecorder, Write
from loraplex.tenants.ledger.journal.file import JournalFile
from loraplex.tenants.ledger.journal.records import Ended, JournalRecord, reservation_text, usage_text
from loraplex.tenants.quotas.reservation import NOTHING_USED, Reservation, SettledUsage

Fault: TypeAlias = Literal["off_at", "fails_at"]
FAULTS: Final[tuple[Fault, ...]] = ("off_at", "fails_at")
OPEN = reservation()
NEW = reservation()


@pytest.fixture
def journal() -> Iterator[CrashingJournal]:
    journal = CrashingJournal.started()
    journal.commits.write([admission(OPEN)])
    journal.commits.maintain(is_idle=True)
    yield journal
    journal.close()


def admission(each: Reservation) -> Admit:
    return Admit(each.id, reservation_text(each))


def end(each: Reservation, completion_tokens: int = 1) -> End:
    return End(each.id, usage_text(used(completion_tokens)))


def records(of: JournalCommits) -> list[JournalRecord]:
    found: list[JournalRecord] = of.call(lambda file: file.unshipped(100))
    return found


def write_and_fail(journal: CrashingJournal, fault: Fault, *writes: Write) -> list[bool | None | Exception]:
    """Write, with a failure of the next sync. After `off_at` the disk is away until the write has returned."""
    journal.disk.at_sync = fault
    answers = journal.commits.write(writes)
    assert journal.disk.has_failed
    journal.disk.is_off, journal.disk.off_at = False, None
    return answers


@pytest.mark.parametrize("fault", FAULTS)
def test_an_end_whose_caller_got_an_error_is_there_once(journal: CrashingJournal, fault: Fault) -> None:
    (answer,) = write_and_fail(journal, fault, end(OPEN))
    assert isinstance(answer, JournalUnavailable)
    assert journal.commits.write([end(OPEN)]) == [True]
    assert [each.usage for each in records(journal.commits) if isinstance(each, Ended)] == [used(1)]
    assert journal.commits.write([end(OPEN)]) == [False]


@pytest.mark.parametrize(("fault", "found"), [("fails_at", []), ("off_at", [(NEW, NOTHING_USED)])])
def test_a_refused_admission_that_is_in_the_file_is_cancelled(
    journal: CrashingJournal, fault: Fault, found: list[tuple[Reservation, SettledUsage]]
) -> None:
    (answer,) = write_and_fail(journal, fault, admission(NEW))
    assert isinstance(answer, JournalUnavailable)
    ended = [each for each in records(journal.commits) if isinstance(each, Ended)]
    assert [(each.reservation, each.usage) for each in ended] == found
    (still_open,) = journal.commits.call(lambda file: file.open_requests())
    assert still_open[1].reservation == OPEN


def test_an_end_is_written_where_an_admission_beside_it_fails(journal: CrashingJournal) -> None:
    refused, ended = write_and_fail(journal, "fails_at", admission(NEW), end(OPEN))
    assert isinstance(refused, JournalUnavailable) and ended is True
    assert [each.usage for each in records(journal.commits) if isinstance(each, Ended)] == [used(1)]


def test_a_failure_is_logged_once_and_lasts_until_the_file_was_written(
    journal: CrashingJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "LOOK_S", 0.0)
    journal.disk.is_off = True
    with capture_logs() as logs:
        for _ in range(3):
            journal.commits.write([admission(NEW)])
            journal.commits.maintain(is_idle=True)
        assert "power lost" in str(journal.commits.failure)
        # It can be opened and read again, but what is written does not last.
        journal.disk.is_off, journal.disk.at_sync = False, "fails_at"
        journal.commits.maintain(is_idle=True)
        assert journal.disk.has_failed and "disk error" in str(journal.commits.failure)
        journal.commits.maintain(is_idle=True)
        assert journal.commits.failure is None
    assert [line["event"] for line in logs] == ["journal_unavailable"]
    assert journal.commits.write([admission(NEW)]) == [None]


def test_a_disk_that_stays_away_is_looked_at_no_more_often_than_a_good_one() -> None:
    looks: list[str] = []

    def open_file() -> JournalFile:
        looks.append("open")
        raise OSError("no disk")

    journal = JournalCommits(open_file, JournalRecorder())
    for _ in range(3):
        journal.maintain(is_idle=True)
    assert len(looks) == 1 and "no disk" in str(journal.failure)


def test_a_disk_that_stays_away_refuses_everything(journal: CrashingJournal) -> None:
    journal.disk.is_off = True
    answers = journal.commits.write([admission(NEW), end(OPEN)])
    assert [type(answer) for answer in answers] == [JournalUnavailable] * 2
    with pytest.raises(JournalUnavailable):
        records(journal.commits)
