"""Background rounds continue after any error in one of them."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from uuid import uuid4

import pytest
from tests.adapters.storage.folder_removal import remove_from

from loraplex.adapters.storage.garbage_collection import BlobGarbageCollector
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.adapters.storage.object_store import ObjectStore
from loraplex.adapters.uploads import cleanup
from loraplex.adapters.uploads.cleanup import UploadCleanup
from loraplex.adapters.uploads.parts import UploadParts
from loraplex.adapters.versions.pending_folders import PENDING_FOLDER, PendingFolders
from loraplex.tenants.database import Database


class Rounds:
    """A round that raises an unexpected error once."""

    def __init__(self) -> None:
        self.count = 0
        self.again = asyncio.Event()

    async def __call__(self) -> None:
        self.count += 1
        if self.count == 1:
            raise ValueError("a defect")
        self.again.set()


async def outlives(run: Callable[[], Coroutine[None, None, None]], rounds: Rounds) -> None:
    """Return when the round after the failed one has begun."""
    running = asyncio.create_task(run())
    try:
        await asyncio.wait_for(rounds.again.wait(), 60)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_cleanup_continues(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaner = UploadCleanup(
        database, UploadParts(ObjectStore(tmp_path / "objects")), LocalAdapterStore(tmp_path)
    )
    rounds = Rounds()
    monkeypatch.setattr(cleanup, "ROUND_SECONDS", 0)
    monkeypatch.setattr(cleaner, "end_overdue", rounds)
    await outlives(cleaner.run, rounds)


async def test_garbage_collection_continues(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removal = BlobGarbageCollector(database, remove_from(LocalAdapterStore(tmp_path)), round_s=0)
    rounds = Rounds()
    monkeypatch.setattr(removal, "sweep", rounds)
    await outlives(removal.run, rounds)


async def test_other_objects_next_to_uploads_are_ignored(tmp_path: Path) -> None:
    objects = ObjectStore(tmp_path / "objects")
    parts, tenant, upload = UploadParts(objects), uuid4(), uuid4()
    for key in ("uploads/theirs/x", f"uploads/{tenant}/theirs/x", f"uploads/{tenant}/{upload}/x"):
        file = objects.spooled()
        file.write_bytes(b"x")
        await objects.take(file, key)
    assert await parts.uploads() == [(tenant, upload)]


def test_a_stray_lock_is_no_upload(tmp_path: Path) -> None:
    folder = tmp_path / PENDING_FOLDER
    folder.mkdir()
    (folder / "stray.lock").touch()
    (folder / f"{uuid4().hex}.lock").touch()
    abandoned = [*PendingFolders(tmp_path).abandoned()]
    assert len(abandoned) == 1 and (folder / "stray.lock").exists()
    abandoned[0].discard()
