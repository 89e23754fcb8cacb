"""What a killed gateway has half written is removed by the next one that starts, and named in its log; a living one's stays."""

import asyncio
import errno
import fcntl
import os
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from structlog.testing import capture_logs
from tests.adapters.uploads.dying_gateway import HALF
from tests.adapters.versions.lifecycle_server import Instant, Server

from loraplex.adapters.storage.local_store import ADAPTERS_FOLDER, LocalAdapterStore
from loraplex.adapters.storage.object_store import ObjectStore
from loraplex.adapters.storage.writers import Writer
from loraplex.adapters.uploads.cleanup import UploadCleanup
from loraplex.adapters.uploads.parts import UploadParts
from loraplex.tenants.database import Database

REMOVED = "half-written adapters of ended processes were removed"
TAKEN_OVER = "uploads of ended processes were taken over"


async def test_a_killed_gateway_leaves_nothing(database: Database, tmp_path: Path) -> None:
    data, version = tmp_path / "data", uuid4()
    arguments = [str(data), str(tmp_path / "bucket"), str(uuid4()), "d" * 64, str(version)]
    gateway = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.adapters.uploads.dying_gateway", *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    assert gateway.stdout is not None and await asyncio.wait_for(gateway.stdout.readline(), 60) == b"stuck\n"

    def started() -> tuple[UploadCleanup, Server]:
        storage = LocalAdapterStore(data / ADAPTERS_FOLDER)
        parts = UploadParts(ObjectStore(data / "objects"))
        return UploadCleanup(database, parts, storage), Server(database, storage.root, Instant())

    def written() -> list[Path]:
        return sorted(each for each in data.rglob("*") if each.is_file() and each.stat().st_size)

    before = written()
    assert len(before) == 5
    cleanup, server = started()
    with capture_logs() as logs:
        await cleanup.sweep()
        await server.sweep()
    assert logs == [] and written() == before, "its gateway lives"

    gateway.kill()
    await gateway.wait()
    cleanup, server = started()
    with capture_logs() as logs:
        await cleanup.sweep()
        await server.sweep()
    assert written() == [] and not [*data.rglob("*.lock")]
    removed, taken_over = logs
    assert (removed["event"], removed["bytes"]) == (REMOVED, 3 * HALF + len("{}"))
    for file in removed["files"]:
        assert any(str(each).startswith(file) for each in before)
    assert (taken_over["event"], taken_over["removed"]) == (TAKEN_OVER, [str(version)])
    with capture_logs() as logs:
        await cleanup.sweep()
        await server.sweep()
    assert logs == []


def test_locks_of_ended_writers_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    ended, living = Writer(folder), Writer(folder)
    paths = [ended.new_path(), living.new_path()]
    for path in paths:
        path.write_bytes(b"half")
    del ended
    assert Writer(folder).remove_abandoned(3600.0) == {str(paths[0]): 4}
    assert [*folder.iterdir()] == [paths[1]]
    assert [lock.name for lock in (tmp_path / ".writers").iterdir()] == [paths[1].name.partition("-")[0]]
    assert living.new_path().parent == folder


def test_locks_are_taken_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS demands of an exclusive lock, which it takes as one of fcntl(2)."""
    lock = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    writer, other = Writer(tmp_path / "temporary"), Writer(tmp_path / "temporary")
    writer.new_path().write_bytes(b"half")
    assert other.remove_abandoned(3600.0) == {}
