"""Private files are new and synced; names are synced by their folder."""

import os
import stat
from pathlib import Path

import pytest

from loraplex.adapters.storage.durable_files import sync_folder, write_private


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were synced to disk."""
    paths, fsync = list[str](), os.fsync

    def recorded(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    return paths


def test_a_private_file_is_synced_and_only_its_owners(tmp_path: Path, synced: list[str]) -> None:
    path = tmp_path / "file"
    write_private(path, b"content")
    assert path.read_bytes() == b"content" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert synced == [str(path)]


def test_a_private_file_replaces_nothing_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("taken", "link"):
        with pytest.raises(FileExistsError):
            write_private(tmp_path / name, b"new")
    assert (tmp_path / "taken").read_bytes() == b"old" and not (tmp_path / "elsewhere").exists()


def test_a_folder_is_synced_through_a_link_and_a_file_is_none(tmp_path: Path, synced: list[str]) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    sync_folder(link)
    assert synced == [str(folder)]
    (folder / "file").touch()
    with pytest.raises(NotADirectoryError):
        sync_folder(folder / "file")
