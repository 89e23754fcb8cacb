"""Files that are counted and hashed while they are written: limits, chunks of all sizes, a full disk, cancellation."""

import asyncio
import hashlib
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.errors import BlobStoreUnavailable, StorageFull, UploadTooLarge
from loraplex.adapters.storage.hashing_writer import WRITE_BYTES, HashedFile, write_chunks


async def sent(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@given(st.lists(st.sampled_from([0, 1, 1000, WRITE_BYTES - 1, WRITE_BYTES, WRITE_BYTES + 1]), max_size=5))
@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_chunks_of_all_sizes(tmp_path: Path, sizes: list[int]) -> None:
    chunks, path = [bytes([number]) * size for number, size in enumerate(sizes)], tmp_path / "file"
    written = await write_chunks(sent(chunks), path, 1 << 30, "file")
    content = b"".join(chunks)
    assert path.read_bytes() == content
    assert (written.size, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    path.unlink()


@pytest.mark.parametrize("size", [1001, WRITE_BYTES * 2])
async def test_no_byte_above_the_limit_is_written(tmp_path: Path, size: int) -> None:
    with pytest.raises(UploadTooLarge, match="file: is larger than 1000 bytes"):
        await write_chunks(sent([b"x" * size]), tmp_path / "file", 1000, "file")
    assert (tmp_path / "file").stat().st_size <= 1000


def test_nothing_that_exists_is_written(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("target", "link"):
        with pytest.raises(BlobStoreUnavailable):
            HashedFile(tmp_path / name, 10, name)
    assert (tmp_path / "target").read_bytes() == b"kept"


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files of this process may have 32 MiB: more than what the tests' own output has so far."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_disk_that_is_full_is_the_servers_fault(tmp_path: Path, small_disk: None) -> None:
    with pytest.raises(BlobStoreUnavailable, match="this machine could not write"):
        await write_chunks(sent([bytes(1 << 20)] * 33), tmp_path / "file", 64 << 20, "file")


async def test_no_write_begins_below_the_floor(tmp_path: Path) -> None:
    with pytest.raises(StorageFull):
        await write_chunks(sent([b"x" * 1000]), tmp_path / "file", 1000, "file", floor_bytes=1 << 60)
    assert (tmp_path / "file").stat().st_size == 0
    assert (
        await write_chunks(sent([b"x" * 1000]), tmp_path / "next", 1000, "file", floor_bytes=1)
    ).size == 1000


async def test_a_cancelled_writer_has_closed_its_file(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * WRITE_BYTES

    writing = asyncio.create_task(write_chunks(endless(), tmp_path / "file", 1 << 40, "file"))
    await asyncio.sleep(0.05)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    size = (tmp_path / "file").stat().st_size
    await asyncio.sleep(0.05)
    assert (tmp_path / "file").stat().st_size == size
