"""Versions in validation when their server ends: another server resumes each once, or rejects it if its files are
gone.
"""

import asyncio
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from tests.adapters.versions.lifecycle_server import (
    BASE_DIGEST,
    QUICK,
    Instant,
    Server,
    server,
    tenant_id,
    version_of,
)

from loraplex.adapters.errors import BlobStoreUnavailable
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE, LocalAdapterStore
from loraplex.adapters.storage.object_store import ObjectStore, S3Options
from loraplex.adapters.versions.pending_folders import PENDING_FOLDER
from loraplex.adapters.versions.version_job import LifecycleConfig
from loraplex.tenants.database import Database

__all__ = ["server", "tenant_id"]


async def test_another_server_resumes_what_a_closed_one_left(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    server.validation.gate.clear()
    begun = await server.begin(tenant_id)
    other = Server(database, server.root, Instant())
    await other.sweep()
    assert other.validation.folders == [], "its holder lives"
    await server.lifecycle.close()
    assert (await version_of(database, begun)).state == "validating"
    await other.sweep()
    assert (await other.version(begun)).state == "ready"
    assert other.pending_files() == []


DYING_HOLDER = """
import sys, time
from pathlib import Path
from uuid import UUID
from loraplex.adapters.versions.pending_folders import PendingFolders

pending = PendingFolders(Path(sys.argv[1])).add(Path(sys.argv[2]), UUID(sys.argv[3]))
print("pending", flush=True)
time.sleep(60)
"""


async def test_a_killed_servers_upload_is_resumed(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    server.validation.gate.clear()
    begun = await server.begin(tenant_id)
    await server.lifecycle.close()
    staged, folder = server.staged(), server.root / PENDING_FOLDER / begun.id.hex
    os.rename(folder, staged.parent / "kept")
    folder.with_suffix(".lock").unlink()
    command = [
        sys.executable,
        "-c",
        DYING_HOLDER,
        str(server.root),
        str(staged.parent / "kept"),
        str(begun.id),
    ]
    holder = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert holder.stdout is not None and await holder.stdout.readline() == b"pending\n"
    other = Server(database, server.root, Instant())
    await other.sweep()
    assert (await other.version(begun)).state == "validating"
    holder.kill()
    await holder.wait()
    await other.sweep()
    assert (await other.version(begun)).state == "ready"


async def test_versions_whose_files_are_gone_are_rejected(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    server.validation.gate.clear()
    begun = await server.begin(tenant_id)
    await server.lifecycle.close()
    for path in (server.root / PENDING_FOLDER / begun.id.hex).iterdir():
        path.unlink()
    (server.root / PENDING_FOLDER / begun.id.hex).rmdir()
    await server.sweep()
    rejected = await server.version(begun)
    assert rejected.state == "rejected" and "upload it again" in rejected.report["checks"][-1]["detail"]

    elsewhere = await server.begin(tenant_id)
    await server.lifecycle.close()
    far = Server(database, server.root.parent / "other disk", Instant(), LifecycleConfig(give_up_s=-1.0))
    await far.sweep()
    assert (await far.version(elsewhere)).state == "rejected"
    await server.sweep()
    assert server.pending_files() == [], "no version needs its files"


async def test_a_server_that_dies_after_storing_leaves_one_step(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    store = server.store.store

    async def store_and_hang(tenant_id: UUID, digest: str, staged: Path) -> Path:
        await store(tenant_id, digest, staged)
        stored.set()
        await asyncio.Event().wait()
        raise AssertionError("never")

    stored = asyncio.Event()
    server.store.store = store_and_hang  # type: ignore[method-assign]
    begun = await server.begin(tenant_id)
    await asyncio.wait_for(stored.wait(), 60)
    noted = await version_of(database, begun)
    assert noted.state == "validating" and noted.digest is not None, "who removes files sees it"
    await server.lifecycle.close()
    other = Server(database, server.root, Instant())
    await other.sweep()
    ready = await other.version(begun)
    assert ready.state == "ready" and ready.report["checks"][-1]["name"] == "probe"
    assert other.validation.folders == [] and other.pending_files() == []


@pytest.mark.parametrize("is_overdue", [False, True], ids=["pending", "overdue"])
async def test_a_version_whose_server_died_on_the_way_to_the_bucket_is_published_before_it_is_ready(
    database: Database, tenant_id: UUID, tmp_path: Path, s3_bucket: S3Options, is_overdue: bool
) -> None:
    """Also where the bucket is down for a while."""
    objects, copying = ObjectStore(tmp_path / "objects", s3_bucket), asyncio.Event()
    copy, down = objects.copy, 2

    async def hang(file: Path, key: str) -> None:
        copying.set()
        await asyncio.Event().wait()

    async def unsteady(file: Path, key: str) -> None:
        nonlocal down
        down -= 1
        if down >= 0:
            raise BlobStoreUnavailable("down")
        await copy(file, key)

    def started(limits: LifecycleConfig) -> Server:
        root = tmp_path / "adapters"
        store = BlobStore(LocalAdapterStore(root), objects, BASE_DIGEST)
        return Server(database, root, Instant(), limits, store)

    server = started(QUICK)
    objects.copy = hang  # type: ignore[method-assign]
    begun = await server.begin(tenant_id)
    await asyncio.wait_for(copying.wait(), 60)
    await server.lifecycle.close()

    objects.copy = unsteady  # type: ignore[method-assign]
    if is_overdue:
        shutil.rmtree(server.root / PENDING_FOLDER)
    later = started(replace(QUICK, give_up_s=-1.0) if is_overdue else QUICK)
    for _ in range(3):
        await later.sweep()
        ready = await later.version(begun)
    assert ready.state == "ready" and later.pending_files() == []
    folder = f"adapters/{tenant_id}/{ready.digest}"
    assert [await objects.exists(f"{folder}/{file}") for file in (CONFIG_FILE, WEIGHTS_FILE)] == [True, True]
