"""Finished adapters with and without a bucket: downloaded once, verified by their digest, gone when deleted."""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from loraplex.adapters.digest import adapter_digest
from loraplex.adapters.errors import BlobCorrupt, BlobMissing, BlobStoreUnavailable, StorageError
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE, LocalAdapterStore
from loraplex.adapters.storage.object_store import ObjectStore, S3Options

BASE = "b" * 64
CONFIG, WEIGHTS = b'{"r": 8}', b"weights" * 1000
DIGEST = adapter_digest(CONFIG, hashlib.sha256(WEIGHTS).digest(), BASE)
TENANT = UUID(int=7)


class Machine:
    """One of several machines that share a bucket, or the only one."""

    def __init__(self, home: Path, bucket: S3Options | None) -> None:
        self.storage = LocalAdapterStore(home / "adapters")
        self.objects = ObjectStore(home / "objects", bucket)
        self.blobs = BlobStore(self.storage, self.objects if bucket else None, BASE)

    def staged(self) -> Path:
        staged = self.storage.make_staged()
        (staged / CONFIG_FILE).write_bytes(CONFIG)
        (staged / WEIGHTS_FILE).write_bytes(WEIGHTS)
        return staged


@pytest.fixture(params=["local", "s3"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    bucket = request.getfixturevalue("s3_bucket") if request.param == "s3" else None
    return Machine(tmp_path / "one", bucket)


async def test_stored_adapters_are_local_until_they_are_deleted(machine: Machine) -> None:
    folder = await machine.blobs.store(TENANT, DIGEST, machine.staged())
    assert await machine.blobs.ensure_local(TENANT, DIGEST) == folder
    assert (folder / WEIGHTS_FILE).read_bytes() == WEIGHTS
    await machine.blobs.delete(TENANT, DIGEST)
    await machine.blobs.delete(TENANT, DIGEST)
    with pytest.raises(BlobMissing):
        await machine.blobs.ensure_local(TENANT, DIGEST)


async def test_a_blob_removed_by_another_process_counts_as_deleted(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await machine.blobs.store(TENANT, DIGEST, machine.staged())
    path = machine.storage.path

    def found_and_gone(tenant_id: UUID, digest: str) -> Path:
        folder = path(tenant_id, digest)
        shutil.rmtree(folder)
        return folder

    with monkeypatch.context() as patched:
        patched.setattr(machine.storage, "path", found_and_gone)
        await machine.blobs.delete(TENANT, DIGEST)
    with pytest.raises(BlobMissing):
        await machine.blobs.ensure_local(TENANT, DIGEST)


async def test_a_tenant_has_its_own_blobs(machine: Machine) -> None:
    await machine.blobs.store(TENANT, DIGEST, machine.staged())
    other = uuid4()
    with pytest.raises(BlobMissing):
        await machine.blobs.ensure_local(other, DIGEST)
    await machine.blobs.store(other, DIGEST, machine.staged())
    await machine.blobs.delete_tenant(TENANT)
    assert (await machine.blobs.ensure_local(other, DIGEST)).is_dir()
    with pytest.raises(BlobMissing):
        await machine.blobs.ensure_local(TENANT, DIGEST)


@pytest.mark.parametrize("digest", ["../" + "a" * 61, "A" * 64, "a" * 63, ""])
async def test_only_digests_are_names(machine: Machine, digest: str) -> None:
    for call in (machine.blobs.ensure_local, machine.blobs.delete):
        with pytest.raises(StorageError, match="64 hexadecimal"):
            await call(TENANT, digest)


async def test_concurrent_callers_share_one_download(
    tmp_path: Path, s3_bucket: S3Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Machine(tmp_path / "one", s3_bucket).blobs.store(
        TENANT, DIGEST, Machine(tmp_path / "one", s3_bucket).staged()
    )
    two = Machine(tmp_path / "two", s3_bucket)
    reads: list[str] = []
    chunks = two.objects.chunks

    def counted(key: str) -> AsyncIterator[bytes]:
        reads.append(key)
        return chunks(key)

    monkeypatch.setattr(two.objects, "chunks", counted)
    asking = [asyncio.create_task(two.blobs.ensure_local(TENANT, DIGEST)) for _ in range(8)]
    await asyncio.sleep(0)
    asking[0].cancel()
    folders = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(folders[0], asyncio.CancelledError)
    assert {*folders[1:]} == {two.storage.path(TENANT, DIGEST)}
    assert len(reads) == 2
    two.storage.verify(TENANT, DIGEST, BASE)
    await two.blobs.ensure_local(TENANT, DIGEST)
    assert len(reads) == 2


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
async def test_a_bucket_with_other_content_serves_nothing(
    tmp_path: Path, s3_bucket: S3Options, file: str
) -> None:
    one, two = Machine(tmp_path / "one", s3_bucket), Machine(tmp_path / "two", s3_bucket)
    await one.blobs.store(TENANT, DIGEST, one.staged())
    (tmp_path / "other").write_bytes(b"other")
    await one.objects.copy(tmp_path / "other", f"adapters/{TENANT}/{DIGEST}/{file}")
    with pytest.raises(BlobCorrupt):
        await two.blobs.ensure_local(TENANT, DIGEST)
    assert not two.storage.exists(TENANT, DIGEST)
    assert [*(tmp_path / "two" / "adapters" / ".staging").iterdir()] == []


async def test_a_blob_larger_than_any_adapter_is_not_read_to_its_end(
    tmp_path: Path, s3_bucket: S3Options
) -> None:
    one = Machine(tmp_path / "one", s3_bucket)
    await one.blobs.store(TENANT, DIGEST, one.staged())
    storage, limits = LocalAdapterStore(tmp_path / "two"), AdapterLimits(max_weights_bytes=100)
    blobs = BlobStore(storage, ObjectStore(tmp_path / "objects", s3_bucket), BASE, limits)
    with pytest.raises(BlobCorrupt, match="larger than 100 bytes"):
        await blobs.ensure_local(TENANT, DIGEST)


async def test_an_unavailable_bucket_does_not_block_local_adapters(tmp_path: Path) -> None:
    gone = S3Options(
        bucket="acme",
        endpoint="http://127.0.0.1:9",
        region="us-east-1",
        access_key_id="a",
        secret_access_key="b",
    )
    machine = Machine(tmp_path, gone)
    machine.storage.put(TENANT, DIGEST, machine.staged())
    assert (await machine.blobs.ensure_local(TENANT, DIGEST)).is_dir()
    with pytest.raises(BlobStoreUnavailable):
        await machine.blobs.ensure_local(TENANT, "c" * 64)


async def test_a_failed_publication_is_repeated(
    tmp_path: Path, s3_bucket: S3Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that was staged is the local one by then."""
    machine, staged = Machine(tmp_path, s3_bucket), Machine(tmp_path, s3_bucket).staged()

    async def fail(*_: object) -> None:
        raise BlobStoreUnavailable("down")

    with monkeypatch.context() as patched, pytest.raises(BlobStoreUnavailable):
        patched.setattr(machine.objects, "copy", fail)
        await machine.blobs.store(TENANT, DIGEST, staged)
    await machine.blobs.store(TENANT, DIGEST, staged)
    other = Machine(tmp_path / "other", s3_bucket)
    assert (await other.blobs.ensure_local(TENANT, DIGEST)).is_dir()
