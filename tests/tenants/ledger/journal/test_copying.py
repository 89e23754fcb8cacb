"""A journal is copied while its gateway writes it: the copy has what was acknowledged before, and can be opened."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from tests.tenants.ledger.journal.fixtures import MAX_BYTES, reservation, used

from loraplex.tenants.errors import JournalUnavailable
from loraplex.tenants.ledger.journal import copying
from loraplex.tenants.ledger.journal.copying import copy_journals
from loraplex.tenants.ledger.journal.folder import LOG_SUFFIX
from loraplex.tenants.ledger.journal.journal import Journal, left_behind

COPIES = 8


@dataclass
class Written:
    """Acknowledged ends in their order; those before `maybe_shipped` may have left the journal."""

    acknowledged: list[UUID] = field(default_factory=list)
    maybe_shipped: int = 0


async def write(journal: Journal, written: Written) -> None:
    """Admit and end one request after the other; some are shipped, so that checkpoints run and the log begins again."""
    acknowledged = written.acknowledged
    while True:
        each = reservation()
        await journal.admit(each)
        await journal.end(each.id, used(1))
        acknowledged.append(each.id)
        if len(acknowledged) % 500 == 0:
            written.maybe_shipped = len(acknowledged)
            await journal.shipped(journal.position - 200)


async def records_of(folder: Path) -> set[UUID]:
    (journal,) = [each async for each in left_behind(folder, max_bytes=MAX_BYTES)]
    try:
        records = await journal.unshipped(100_000)
        return {record.reservation.id for record in records}
    finally:
        await journal.close()


async def test_copies_of_a_journal_in_use_are_whole(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "used", uuid4(), max_bytes=MAX_BYTES)
    written = Written()
    acknowledged, compared = written.acknowledged, 0
    writing = [asyncio.create_task(write(journal, written)) for _ in range(8)]
    try:
        for number in range(COPIES):
            await asyncio.sleep(0.05)
            target = tmp_path / f"copy-{number}"
            target.mkdir()
            before = len(acknowledged)
            assert await asyncio.to_thread(copy_journals, tmp_path / "used", target) == [
                f"{journal.gateway_id}.sqlite"
            ]
            found = await records_of(target)
            unshipped = set(acknowledged[written.maybe_shipped : before])
            assert unshipped <= found
            compared += len(unshipped)
    finally:
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        await journal.close()
    assert len(acknowledged) > 500 and compared


async def test_a_drained_journal_that_disappears_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_folder, target = tmp_path / "used", tmp_path / "copy"
    for folder in (used_folder, target):
        folder.mkdir()
    file = used_folder / f"{uuid4()}.sqlite"
    file.write_bytes(b"pages")

    def remove(log: Path) -> bytes:
        file.unlink(missing_ok=True)
        return b""

    monkeypatch.setattr(copying, "_header", remove)
    assert copy_journals(used_folder, target) == []
    assert list(target.iterdir()) == []


def test_a_log_that_began_again_means_another_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_folder, target = tmp_path / "used", tmp_path / "copy"
    for folder in (used_folder, target):
        folder.mkdir()
    file = used_folder / f"{uuid4()}.sqlite"
    file.write_bytes(b"pages")
    Path(f"{file}{LOG_SUFFIX}").write_bytes(b"frames")
    headers = iter([b"1", b"2", b"2", b"2"])
    monkeypatch.setattr(copying, "_header", lambda log: next(headers))
    assert copy_journals(used_folder, target) == [file.name]
    assert next(headers, None) is None
    monkeypatch.setattr(copying, "_header", lambda log: uuid4().bytes)
    with pytest.raises(JournalUnavailable, match="changes too fast"):
        copy_journals(used_folder, target)


def test_a_log_that_went_away_is_not_in_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gateway ended between two attempts: all of the log is in the file, and an older log would be replayed over it."""
    used_folder, target = tmp_path / "used", tmp_path / "copy"
    for folder in (used_folder, target):
        folder.mkdir()
    file = used_folder / f"{uuid4()}.sqlite"
    file.write_bytes(b"pages")
    Path(f"{file}{LOG_SUFFIX}").write_bytes(b"frames")
    read = copying._header
    seen: list[bytes] = []

    def end_after_the_first_copy(log: Path) -> bytes:
        if len(seen) == 1:
            log.unlink()
        seen.append(read(log))
        return seen[-1]

    monkeypatch.setattr(copying, "_header", end_after_the_first_copy)
    assert copy_journals(used_folder, target) == [file.name]
    assert seen == [b"frames", b"", b"", b""]
    assert [each.name for each in target.iterdir()] == [file.name]
