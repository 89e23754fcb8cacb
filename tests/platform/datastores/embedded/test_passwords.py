"""Password files: whole or absent, private, and read again."""

import os
import stat
from pathlib import Path

import pytest

from loraplex.platform.datastores.embedded.passwords import kept_password


def test_a_password_is_generated_once(tmp_path: Path) -> None:
    path = tmp_path / "password"
    first = kept_password(path)
    assert len(first) >= 32 and kept_password(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["password"]


def test_a_crash_while_it_is_written_leaves_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "password"

    def crash(_: int) -> None:
        raise OSError("the machine went down")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", crash)
        with pytest.raises(OSError, match="went down"):
            kept_password(path)
    assert not path.exists()
    assert kept_password(path) == kept_password(path) != ""


def test_an_empty_file_is_no_password(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.touch()
    assert kept_password(path) == kept_password(path) != ""
