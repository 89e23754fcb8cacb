"""The server secret is generated once with mode 0600; namespaces depend only on secret and tenant."""

import hmac
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.server.secret import SECRET_FILE, derive, server_secret, tenant_namespace
from loraplex.platform.startup_errors import SettingsError


def test_generated_once_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: server_secret(None, folder), range(16)))
    assert len(secrets) == 1
    assert (folder / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert [p.name for p in folder.iterdir()] == [SECRET_FILE]
    assert len(secrets.pop()) >= 48


def test_a_new_secret_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is synced with its folder, here through a link; else the next start would generate another secret."""
    synced, fsync = list[str](), os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    server_secret(None, tmp_path / "data")
    assert len(synced) == 2 and synced[1] == str(tmp_path / "disk")


def test_configured_secret_wins_and_short_ones_are_refused(tmp_path: Path) -> None:
    assert server_secret("x" * 32, tmp_path) == b"x" * 32
    assert not list(tmp_path.iterdir())
    with pytest.raises(SettingsError, match="at least 16"):
        server_secret("short", tmp_path)
    (tmp_path / SECRET_FILE).write_text("")
    with pytest.raises(SettingsError, match=SECRET_FILE):
        server_secret(None, tmp_path)


def test_namespace_is_stable() -> None:
    parts = (b"loraplex/tenant-namespace/v1", b"tenant-a")
    message = b"".join(struct.pack(">Q", len(part)) + part for part in parts)
    namespace = tenant_namespace(b"s" * 32, "tenant-a")
    assert len(namespace) == 32
    assert namespace == tenant_namespace(b"s" * 32, "tenant-a")
    assert namespace == hmac.digest(b"s" * 32, message, "sha256")
    assert namespace != tenant_namespace(b"t" * 32, "tenant-a")
    assert namespace != tenant_namespace(b"s" * 32, "tenant-b")


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_parts_are_never_confused(left: list[bytes], right: list[bytes]) -> None:
    assert (derive(b"k", *left) == derive(b"k", *right)) == (left == right)
