"""The bound in bytes and a disk without room refuse admissions by name, and never the end of a request that was admitted."""

import asyncio
import resource
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from tests.tenants.ledger.journal.fixtures import progressed, reservation, used

from loraplex.tenants.errors import JournalFull
from loraplex.tenants.ledger.journal import commits, writer
from loraplex.tenants.ledger.journal.file import JournalConfig
from loraplex.tenants.ledger.journal.folder import JournalLock
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.quotas.reservation import Reservation

SMALL = JournalConfig(
    max_bytes=2 << 20,
    base_pages=64,
    growth_pages=16,
    checkpoint_pages=16,
    spare_pages=16,
    min_free_bytes=1 << 20,
)


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    lock = JournalLock.take(tmp_path, uuid4())
    assert lock is not None
    journal = await Journal.open_locked(lock, SMALL)
    yield journal
    await journal.close()


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


async def admit_until_full(journal: Journal) -> list[Reservation]:
    admitted = []
    with pytest.raises(JournalFull):
        while True:
            admitted.append(reservation())
            await journal.admit(admitted[-1])
    return admitted[:-1]


async def test_the_bound_refuses_admissions_and_no_end(journal: Journal, tmp_path: Path) -> None:
    admitted = await admit_until_full(journal)
    assert len(admitted) > 150
    assert journal.is_full
    for n, each in enumerate(admitted):
        journal.progress(each.id, progressed(n))
    assert all([await journal.end(each.id, used(n)) for n, each in enumerate(admitted)])
    assert bytes_on_disk(tmp_path) <= SMALL.max_bytes
    assert [record.reservation for record in await journal.unshipped(10_000)] == admitted * 2


async def test_a_drained_journal_admits_again_and_returns_its_pages(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SHRINK_PAUSE_S", 0.0)
    for each in await admit_until_full(journal):
        await journal.end(each.id, used(1))
    full = bytes_on_disk(tmp_path)
    await journal.shipped(journal.position)
    await journal.admit(reservation())
    assert not journal.is_full
    async with asyncio.timeout(60):
        while bytes_on_disk(tmp_path) > full // 2:
            await asyncio.sleep(0.01)
    assert await journal.unshipped(10) != []


async def test_a_disk_that_is_nearly_full_refuses_admissions_and_no_end(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = reservation()
    await journal.admit(each)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=SMALL.min_free_bytes - 1))
    with pytest.raises(JournalFull, match="1048576 bytes free"):
        await journal.admit(reservation())
    assert await journal.end(each.id, used(1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=SMALL.min_free_bytes))
    await journal.admit(reservation())
    assert not journal.is_full


async def until(journal: Journal, trouble: str | None) -> None:
    """Wait until the journal says so by itself: nobody writes."""
    async with asyncio.timeout(60):
        while (journal.trouble is None) != (trouble is None):
            await asyncio.sleep(0.01)
    assert trouble is None or trouble in str(journal.trouble)


async def test_a_disk_below_its_floor_is_a_trouble_before_anyone_is_refused_and_ends_by_itself(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "LOOK_S", 0.05)
    monkeypatch.setattr(writer, "LOOK_S", 0.05)
    assert journal.trouble is None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=SMALL.min_free_bytes - 1))
    await until(journal, "1048576 bytes free")
    with pytest.raises(JournalFull, match="1048576 bytes free"):
        await journal.admit(reservation())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=SMALL.min_free_bytes))
    await until(journal, None)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse to extend any file beyond this size, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_quota_of_the_system_refuses_admissions_and_no_end(journal: Journal, tmp_path: Path) -> None:
    await journal.admit(reservation())
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    with largest_file(max(sizes)):
        admitted = await admit_until_full(journal)
        assert journal.is_full
        assert all([await journal.end(each.id, used(1)) for each in admitted])
    assert max(path.stat().st_size for path in tmp_path.iterdir()) == max(sizes)
    await journal.admit(reservation())


async def test_the_files_have_the_size_that_is_reported(journal: Journal, tmp_path: Path) -> None:
    await admit_until_full(journal)
    assert abs(bytes_on_disk(tmp_path) - journal.commits.bytes) < 0.1 * SMALL.max_bytes


async def test_one_row_that_cannot_be_written_fails_alone(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = reservation(), reservation()
    monkeypatch.setattr(
        "loraplex.tenants.ledger.journal.journal.reservation_text",
        lambda each: object() if each is bad else "{}",
    )
    results = await asyncio.gather(journal.admit(bad), journal.admit(good), return_exceptions=True)
    assert [type(result) for result in results] == [sqlite3.ProgrammingError, type(None)]
