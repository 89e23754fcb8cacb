"""The interface of the object store, on a folder and on a bucket."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.adapters.errors import BlobMissing, BlobStoreUnavailable
from loraplex.adapters.storage.object_store import CHUNK_BYTES, ObjectStore, S3Options


@pytest.fixture(params=["local", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    bucket = request.getfixturevalue("s3_bucket") if request.param == "s3" else None
    return ObjectStore(tmp_path / "objects", bucket)


def spooled(objects: ObjectStore, content: bytes) -> Path:
    path = objects.spooled()
    path.write_bytes(content)
    return path


async def content(objects: ObjectStore, key: str) -> bytes:
    return b"".join([chunk async for chunk in objects.chunks(key)])


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1])
async def test_stored_content_is_read_back(objects: ObjectStore, size: int) -> None:
    expected = os.urandom(size)
    file = spooled(objects, expected)
    await objects.take(file, "uploads/a/b/c")
    assert not file.exists()
    assert await content(objects, "uploads/a/b/c") == expected
    assert await objects.exists("uploads/a/b/c")


async def test_a_copy_leaves_its_source(objects: ObjectStore, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"first")
    await objects.copy(file, "adapters/x")
    file.write_bytes(b"second")
    assert await content(objects, "adapters/x") == b"first"
    await objects.copy(file, "adapters/x")
    assert await content(objects, "adapters/x") == b"second"


async def test_missing_objects(objects: ObjectStore) -> None:
    with pytest.raises(BlobMissing):
        await content(objects, "uploads/none")
    assert not await objects.exists("uploads/none")
    assert await objects.folders("uploads") == []
    await objects.delete("uploads/none")
    await objects.delete_below("uploads/none")


async def test_folders_and_what_is_below_them(objects: ObjectStore) -> None:
    for key in ("uploads/a/1/x", "uploads/a/1/y", "uploads/a/10/x", "uploads/b/2/x"):
        await objects.take(spooled(objects, b"part"), key)
    assert await objects.folders("uploads") == ["a", "b"]
    assert await objects.folders("uploads/a") == ["1", "10"]
    await objects.delete_below("uploads/a/1")
    assert await objects.folders("uploads/a") == ["10"]
    await objects.delete("uploads/b/2/x")
    assert await objects.folders("uploads") == ["a"]


async def test_the_local_folder_is_private(tmp_path: Path) -> None:
    objects = ObjectStore(tmp_path / "objects")
    await objects.take(spooled(objects, b"part"), "uploads/a/1/x")
    assert (tmp_path / "objects").stat().st_mode & 0o777 == 0o700


async def test_an_unavailable_server_is_reported_without_its_address(tmp_path: Path) -> None:
    bucket = S3Options(
        bucket="acme",
        endpoint="http://127.0.0.1:9",
        region="us-east-1",
        access_key_id="AKIA",
        secret_access_key="very secret",
    )
    objects = ObjectStore(tmp_path / "objects", bucket)
    calls: list[Callable[[], object]] = [
        lambda: objects.exists("x"),
        lambda: objects.take(spooled(objects, b"part"), "x"),
    ]
    for call in calls:
        with pytest.raises(BlobStoreUnavailable) as caught:
            await call()  # type: ignore[misc]
        assert "127.0.0.1" not in str(caught.value)
    assert "very secret" not in repr(bucket) and "AKIA" not in repr(bucket)
