"""The journal returns what was written, in order and once, until PostgreSQL has it; one process has each."""

import asyncio
import fcntl
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from tests.tenants.ledger.journal.fixtures import MAX_BYTES, progressed, reservation, used

from loraplex.tenants.errors import JournalUnavailable
from loraplex.tenants.ledger.journal import journal as journal_module
from loraplex.tenants.ledger.journal.folder import JournalLock
from loraplex.tenants.ledger.journal.journal import Journal, left_behind
from loraplex.tenants.ledger.journal.records import Admitted, Ended, OpenRequest
from loraplex.tenants.quotas.reservation import NOTHING_USED, SettledUsage


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = await Journal.open(tmp_path, uuid4(), max_bytes=MAX_BYTES)
    yield journal
    await journal.close()


async def reopen(journal: Journal, folder: Path) -> Journal:
    await journal.close()
    return await Journal.open(folder, journal.gateway_id, max_bytes=MAX_BYTES)


async def test_records_are_read_in_the_order_of_writing(journal: Journal) -> None:
    first, second = reservation(), reservation()
    await journal.admit(first)
    await journal.admit(second)
    assert await journal.end(second.id, used(7))
    assert await journal.unshipped(10) == [Admitted(1, first), Admitted(2, second), Ended(3, second, used(7))]
    assert await journal.unshipped(2) == [Admitted(1, first), Admitted(2, second)]
    assert (journal.position, journal.waiting) == (3, 3)


async def test_shipped_records_are_forgotten_but_open_requests_are_not(
    journal: Journal, tmp_path: Path
) -> None:
    open_one, ended = reservation(), reservation()
    for each in (open_one, ended):
        await journal.admit(each)
    await journal.end(ended.id, used(1))
    await journal.shipped(3)
    assert (await journal.unshipped(10), journal.waiting) == ([], 0)
    again = await reopen(journal, tmp_path)
    assert await again.open_requests() == [OpenRequest(open_one, NOTHING_USED)]
    assert await again.end(open_one.id, used(2))
    assert await again.unshipped(10) == [Ended(4, open_one, used(2))]
    await again.shipped(4)
    await again.close()
    assert not list(tmp_path.glob("*.sqlite*"))


async def test_a_record_shipped_in_part_is_read_again_from_there(journal: Journal) -> None:
    each = reservation()
    await journal.admit(each)
    await journal.end(each.id, used(1))
    await journal.shipped(1)
    assert await journal.unshipped(10) == [Ended(2, each, used(1))]
    await journal.shipped(1)
    assert journal.waiting == 1


async def test_a_request_ends_once(journal: Journal) -> None:
    each = reservation()
    assert not await journal.end(each.id, used(1))
    await journal.admit(each)
    assert await asyncio.gather(*(journal.end(each.id, used(n)) for n in (1, 2))) == [True, False]
    assert await journal.unshipped(10) == [Admitted(1, each), Ended(2, each, used(1))]


async def test_a_repeated_admission_replaces_the_first(journal: Journal) -> None:
    first = reservation(epoch=1)
    second = reservation(first.id, epoch=2)
    await journal.admit(first)
    await journal.admit(second)
    assert await journal.unshipped(10) == [Admitted(2, second)]
    await journal.end(first.id, used(1))
    assert await journal.open_requests() == []


async def test_a_cancelled_request_is_a_record(journal: Journal) -> None:
    each = reservation()
    await journal.admit(each)
    await journal.end(each.id, NOTHING_USED)
    assert await journal.unshipped(10) == [Admitted(1, each), Ended(2, each, NOTHING_USED)]


async def test_progress_is_written_and_ends_with_its_request(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "PROGRESS_S", 0.0)
    each, ended = reservation(), reservation()
    for one in (each, ended):
        await journal.admit(one)
    await journal.end(ended.id, used(1))
    journal.progress(each.id, progressed(4))
    journal.progress(each.id, progressed(5))
    journal.progress(ended.id, progressed(6))
    await asyncio.sleep(0.01)
    assert await journal.open_requests() == [OpenRequest(each, progressed(5))]


async def test_closing_writes_the_last_progress(journal: Journal, tmp_path: Path) -> None:
    each = reservation()
    await journal.admit(each)
    journal.progress(each.id, progressed(9))
    again = await reopen(journal, tmp_path)
    assert await again.open_requests() == [OpenRequest(each, progressed(9))]
    await again.close()


async def test_a_rejected_end_stays_as_a_dead_letter(journal: Journal, tmp_path: Path) -> None:
    bad, good = reservation(), reservation()
    for each in (bad, good):
        await journal.admit(each)
        await journal.end(each.id, used(1))
    await journal.reject(2, "a reason\x00with \ud800 anything")
    await journal.shipped(4)
    again = await reopen(journal, tmp_path)
    (letter,) = await again.dead_letters()
    assert (letter.record, letter.reason) == (Ended(2, bad, used(1)), "a reason\x00with ? anything")
    assert (await again.unshipped(10), await again.open_requests(), again.commits.dead_letters) == ([], [], 1)
    await again.close()
    assert list(tmp_path.glob("*.sqlite"))


async def test_a_rejected_admission_is_forgotten_with_its_end(journal: Journal) -> None:
    each = reservation()
    await journal.admit(each)
    await journal.reject(1, "no such tenant")
    await journal.shipped(1)
    assert [letter.record for letter in await journal.dead_letters()] == [Admitted(1, each)]
    await journal.end(each.id, used(1))
    await journal.shipped(2)
    assert (await journal.dead_letters(), journal.commits.dead_letters) == ([], 0)


async def test_many_writers_share_commits(journal: Journal) -> None:
    many = [reservation() for _ in range(300)]
    await asyncio.gather(*(journal.admit(each) for each in many))
    await asyncio.gather(*(journal.end(each.id, used(n)) for n, each in enumerate(many)))
    records = await journal.unshipped(1000)
    assert [record.position for record in records] == [*range(1, 601)]
    assert [record.reservation for record in records] == many + many
    await journal.shipped(600)
    assert await journal.unshipped(1) == []


async def test_a_journal_belongs_to_one_process(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(JournalUnavailable, match="another process"):
        await Journal.open(tmp_path, journal.gateway_id, max_bytes=MAX_BYTES)
    assert [each async for each in left_behind(tmp_path, max_bytes=MAX_BYTES)] == []


def test_a_lock_that_its_owner_removes_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no name any more: a third process could take one of the same name."""
    gateway_id, flock = uuid4(), fcntl.flock
    owner = JournalLock.take(tmp_path, gateway_id)
    assert owner is not None

    def removed_before(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        owner.remove()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    assert JournalLock.take(tmp_path, gateway_id) is None
    again = JournalLock.take(tmp_path, gateway_id)
    assert again is not None
    again.remove()
    assert [*tmp_path.iterdir()] == []


async def test_a_journal_left_behind_is_taken_once(journal: Journal, tmp_path: Path) -> None:
    each = reservation()
    await journal.admit(each)
    await journal.close()
    taken = left_behind(tmp_path, max_bytes=MAX_BYTES)
    found = await anext(taken)
    assert [other async for other in left_behind(tmp_path, max_bytes=MAX_BYTES)] == []
    assert (found.gateway_id, await found.open_requests()) == (
        journal.gateway_id,
        [OpenRequest(each, NOTHING_USED)],
    )
    await found.end(each.id, SettledUsage(outcome="unknown"))
    await found.shipped(found.position)
    await found.close()
    assert [other async for other in taken] == []
    assert list(tmp_path.iterdir()) == []


async def put_garbage(path: Path) -> None:
    path.write_bytes(b"garbage" * 1000)


async def put_other_format(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize("name", ["notes", "", "{4b1c0e9e-6c5c-4a53-9a52-5d9b0a0f6a52}", "4B1C0E9E" * 4])
async def test_a_foreign_file_is_left_alone(journal: Journal, tmp_path: Path, name: str) -> None:
    """As an editor or an operator leaves one: it stopped the start of every later gateway."""
    foreign = tmp_path / f"{name}.sqlite"
    foreign.write_text("mine")
    await journal.close()
    assert [each async for each in left_behind(tmp_path, max_bytes=MAX_BYTES)] == []
    assert foreign.read_text() == "mine" and [*tmp_path.iterdir()] == [foreign]


async def put_unreadable_row(path: Path) -> None:
    journal = await Journal.open(path.parent, UUID(path.stem), max_bytes=MAX_BYTES)
    await journal.admit(reservation())
    await journal.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE admissions SET reservation = '{}'")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("damage", [put_garbage, put_other_format, put_unreadable_row])
async def test_an_unreadable_journal_is_moved_aside(
    tmp_path: Path, damage: Callable[[Path], Awaitable[None]]
) -> None:
    path = tmp_path / f"{uuid4()}.sqlite"
    await damage(path)
    size = path.stat().st_size
    assert [each async for each in left_behind(tmp_path, max_bytes=MAX_BYTES)] == []
    (aside,) = tmp_path.iterdir()
    assert (aside.name, aside.stat().st_size) == (f"{path.name}.unreadable", size)


async def test_a_closed_journal_writes_nothing(journal: Journal) -> None:
    await journal.close()
    await journal.close()
    with pytest.raises(JournalUnavailable, match="stopping"):
        await journal.admit(reservation())


async def test_files_are_for_their_owner_alone(journal: Journal, tmp_path: Path) -> None:
    await journal.admit(reservation())
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
