"""Which process has the lock of an uploaded folder, and when another may resume it."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from uuid import uuid4

import pytest

from loraplex.adapters.errors import BlobStoreUnavailable, StorageError
from loraplex.adapters.versions.pending_folders import GATEWAYS_LOCK, PENDING_FOLDER, PendingFolders


@pytest.fixture
def folders(tmp_path: Path) -> PendingFolders:
    return PendingFolders(tmp_path / "adapters")


def staged(folder: Path) -> Path:
    path = folder / uuid4().hex
    path.mkdir(parents=True)
    (path / "file").write_text("content")
    return path


def names(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "adapters" / PENDING_FOLDER))


def test_adding_moves_the_folder_and_discarding_leaves_nothing(
    tmp_path: Path, folders: PendingFolders
) -> None:
    folder, version_id = staged(tmp_path), uuid4()
    pending = folders.add(folder, version_id)
    assert not folder.exists() and (pending.folder / "file").read_text() == "content"
    assert pending.folder.parent.stat().st_mode & 0o077 == 0
    pending.folder.with_name(f"{pending.folder.name}.json").write_text("a draft")
    for _ in range(2):
        pending.discard()
    assert names(tmp_path) == []


def test_only_an_unlocked_folder_is_resumed(tmp_path: Path, folders: PendingFolders) -> None:
    version_id = uuid4()
    pending = folders.add(staged(tmp_path), version_id)
    assert list(folders.abandoned()) == []
    with pytest.raises(StorageError, match="pending already"):
        folders.add(staged(tmp_path), version_id)
    pending.unlock()
    pending.unlock()
    (again,) = folders.abandoned()
    assert (again.version_id, again.folder) == (version_id, pending.folder)
    assert list(folders.abandoned()) == []
    pending.discard()
    assert (again.folder / "file").exists(), "who let go has no say any more"
    again.discard()
    assert names(tmp_path) == []


def test_a_folder_that_is_being_added_is_never_abandoned(tmp_path: Path, folders: PendingFolders) -> None:
    """Another process looks for abandoned folders all the time."""
    (tmp_path / "adapters" / PENDING_FOLDER).mkdir(parents=True)
    added = Event()

    def resumed() -> int:
        found = 0
        while not added.is_set():
            for pending in PendingFolders(tmp_path / "adapters").abandoned():
                pending.discard()
                found += 1
        return found

    with ThreadPoolExecutor(1) as other:
        finding = other.submit(resumed)
        try:
            for _ in range(500):
                folders.add(staged(tmp_path), uuid4()).discard()
        finally:
            added.set()
        assert finding.result() == 0
    assert names(tmp_path) == []


def test_other_files_are_no_uploads(tmp_path: Path, folders: PendingFolders) -> None:
    assert list(folders.abandoned()) == []
    folders.add(staged(tmp_path), uuid4()).discard()
    root = tmp_path / "adapters" / PENDING_FOLDER
    (root / "notes.lock").write_text("")
    os.symlink("/etc/passwd", root / f"{uuid4().hex}.lock")
    with pytest.raises(OSError):
        list(folders.abandoned())


def test_a_folder_that_cannot_be_moved_leaves_no_lock(tmp_path: Path, folders: PendingFolders) -> None:
    with pytest.raises(BlobStoreUnavailable):
        folders.add(tmp_path / "missing", uuid4())
    assert names(tmp_path) == []


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path, folders: PendingFolders) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "adapters" / PENDING_FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="symbolic link"):
        folders.add(staged(tmp_path), uuid4())


def test_a_server_that_resumes_folders_is_known_to_others(tmp_path: Path, folders: PendingFolders) -> None:
    others = PendingFolders(tmp_path / "adapters")
    assert not others.is_watched() and not (tmp_path / "adapters").exists()
    with folders.watched(), PendingFolders(tmp_path / "adapters").watched():
        assert others.is_watched() and others.is_watched()
        assert list(others.abandoned()) == [], "its lock is no upload"
    assert not others.is_watched()
    lock = tmp_path / "adapters" / PENDING_FOLDER / GATEWAYS_LOCK
    lock.unlink()
    lock.symlink_to(tmp_path)
    with pytest.raises(StorageError, match="cannot be read"):
        others.is_watched()


def test_commands_that_look_at_once_see_no_server(tmp_path: Path, folders: PendingFolders) -> None:
    with folders.watched():
        pass

    def look(_: int) -> bool:
        return any(PendingFolders(tmp_path / "adapters").is_watched() for _ in range(300))

    with ThreadPoolExecutor(8) as commands:
        assert not any(commands.map(look, range(8)))
