"""Who holds an uploaded folder, and who may take it up."""

import os
from pathlib import Path
from uuid import uuid4

import pytest

from loraplex.adapters.errors import StorageError
from loraplex.adapters.versions.pending_folders import HELD_FOLDER, PendingFolders


@pytest.fixture
def held_uploads(tmp_path: Path) -> PendingFolders:
    return PendingFolders(tmp_path / "adapters")


def staged(folder: Path) -> Path:
    path = folder / uuid4().hex
    path.mkdir(parents=True)
    (path / "file").write_text("content")
    return path


def names(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "adapters" / HELD_FOLDER))


def test_a_hold_takes_the_folder_and_a_release_leaves_nothing(
    tmp_path: Path, held_uploads: PendingFolders
) -> None:
    folder, version_id = staged(tmp_path), uuid4()
    held = held_uploads.hold(folder, version_id)
    assert not folder.exists() and (held.folder / "file").read_text() == "content"
    assert held.folder.parent.stat().st_mode & 0o077 == 0
    held.folder.with_name(f"{held.folder.name}.json").write_text("a draft")
    for _ in range(2):
        held.release()
    assert names(tmp_path) == []


def test_only_a_free_upload_is_taken_up(tmp_path: Path, held_uploads: PendingFolders) -> None:
    version_id = uuid4()
    held = held_uploads.hold(staged(tmp_path), version_id)
    assert list(held_uploads.abandoned()) == []
    with pytest.raises(StorageError, match="held already"):
        held_uploads.hold(staged(tmp_path), version_id)
    held.let_go()
    held.let_go()
    (again,) = held_uploads.abandoned()
    assert (again.version_id, again.folder) == (version_id, held.folder)
    assert list(held_uploads.abandoned()) == []
    held.release()
    assert (again.folder / "file").exists(), "who let go has no say any more"
    again.release()
    assert names(tmp_path) == []


def test_what_others_put_there_is_no_upload(tmp_path: Path, held_uploads: PendingFolders) -> None:
    assert list(held_uploads.abandoned()) == []
    held_uploads.hold(staged(tmp_path), uuid4()).release()
    root = tmp_path / "adapters" / HELD_FOLDER
    (root / "notes.lock").write_text("")
    os.symlink("/etc/passwd", root / f"{uuid4().hex}.lock")
    with pytest.raises(OSError):
        list(held_uploads.abandoned())


def test_a_folder_that_cannot_be_taken_leaves_no_lock(tmp_path: Path, held_uploads: PendingFolders) -> None:
    with pytest.raises(FileNotFoundError):
        held_uploads.hold(tmp_path / "missing", uuid4())
    assert names(tmp_path) == []


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path, held_uploads: PendingFolders) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "adapters" / HELD_FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="symbolic link"):
        held_uploads.hold(staged(tmp_path), uuid4())
