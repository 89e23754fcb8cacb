"""Local copies of a bucket's adapters: bounded by bytes, LRU eviction, never one in use."""

import asyncio
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from loraplex.adapters.digest import adapter_digest
from loraplex.adapters.errors import BlobStoreUnavailable
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_cache import USE_RESOLUTION_S, LocalCache, LocalCacheConfig
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE, LocalAdapterStore
from loraplex.adapters.storage.object_store import ObjectStore, S3Options

BASE, TENANT, SIZE = "b" * 64, UUID(int=7), 1000
LIMITS = LocalCacheConfig(max_bytes=3 * SIZE, in_use_s=600.0)
LONG_AGO = LIMITS.in_use_s + 2 * USE_RESOLUTION_S


class Machine:
    def __init__(self, home: Path, bucket: S3Options | None, limits: LocalCacheConfig = LIMITS) -> None:
        self.home = home
        self.storage = LocalAdapterStore(home / "adapters")
        objects = ObjectStore(home / "objects", bucket)
        self.blobs = BlobStore(self.storage, objects if bucket else None, BASE, copy_limits=limits)

    def staged(self, number: int) -> tuple[str, Path]:
        """An adapter of `SIZE` bytes, and its digest."""
        folder, config = self.storage.make_staged(), b'{"r": %d}' % number
        weights = bytes([number]) * (SIZE - len(config))
        (folder / CONFIG_FILE).write_bytes(config)
        (folder / WEIGHTS_FILE).write_bytes(weights)
        return adapter_digest(config, hashlib.sha256(weights).digest(), BASE), folder

    async def store(self, numbers: range) -> list[str]:
        digests = []
        for number in numbers:
            digest, folder = self.staged(number)
            await self.blobs.store(TENANT, digest, folder)
            digests.append(digest)
        return digests

    def unused_for(self, digest: str, seconds: float) -> None:
        then = time.time() - seconds
        os.utime(self.storage.path(TENANT, digest), (then, then))

    def here(self, digests: list[str]) -> list[int]:
        return [index for index, digest in enumerate(digests) if self.storage.exists(TENANT, digest)]


async def test_the_least_recently_used_copy_is_evicted_and_fetched_again(
    tmp_path: Path, s3_bucket: S3Options
) -> None:
    digests = await Machine(tmp_path / "one", s3_bucket).store(range(1, 6))
    machine = Machine(tmp_path / "two", s3_bucket)
    for age, digest in enumerate(digests):
        await machine.blobs.ensure_local(TENANT, digest)
        machine.unused_for(digest, LONG_AGO + 100 * (5 - age))
    folder = await machine.blobs.ensure_local(TENANT, digests[0])
    with (folder / WEIGHTS_FILE).open("rb") as opened:
        assert await machine.blobs.evict() == 2
        assert machine.here(digests) == [0, 3, 4]
        assert len(opened.read()) > 0
    assert await machine.blobs.evict() == 0
    await machine.blobs.ensure_local(TENANT, digests[1])
    machine.storage.verify(TENANT, digests[1], BASE)
    assert await machine.blobs.evict() == 1 and machine.here(digests) == [0, 1, 4]
    assert [*(machine.storage.root / ".staging").iterdir()] == []


async def test_copies_that_a_request_may_read_stay(tmp_path: Path, s3_bucket: S3Options) -> None:
    """Also where that is more than the bound, and where another process of the machine looks after it."""
    digests = await Machine(tmp_path / "one", s3_bucket).store(range(1, 6))
    machine, neighbour = Machine(tmp_path / "two", s3_bucket), Machine(tmp_path / "two", s3_bucket)
    for digest in digests:
        await machine.blobs.ensure_local(TENANT, digest)
        machine.unused_for(digest, LIMITS.in_use_s - 1)
    assert await neighbour.blobs.evict() == 0
    for digest in digests:
        machine.unused_for(digest, LONG_AGO)
    for digest in digests[1:]:
        await machine.blobs.ensure_local(TENANT, digest)
    assert await neighbour.blobs.evict() == 1 and machine.here(digests) == [1, 2, 3, 4]


async def test_use_during_eviction_never_returns_a_missing_path(tmp_path: Path, s3_bucket: S3Options) -> None:
    digests = await Machine(tmp_path / "one", s3_bucket).store(range(1, 6))
    machine = Machine(tmp_path / "two", s3_bucket)
    neighbour = Machine(tmp_path / "two", s3_bucket, LocalCacheConfig(max_bytes=1, in_use_s=LIMITS.in_use_s))
    removed = 0
    for round_number in range(12):
        digest = digests[round_number % len(digests)]
        await machine.blobs.ensure_local(TENANT, digest)
        machine.unused_for(digest, LONG_AGO)
        folder, gone = await asyncio.gather(
            machine.blobs.ensure_local(TENANT, digest), neighbour.blobs.evict()
        )
        assert (folder / WEIGHTS_FILE).stat().st_size and (folder / CONFIG_FILE).is_file()
        removed += gone
        machine.unused_for(digest, LONG_AGO)
        removed += await neighbour.blobs.evict()
        assert machine.here(digests) == []
    assert removed >= 12


async def test_what_the_bucket_lacks_stays_and_deleted_ones_go(tmp_path: Path, s3_bucket: S3Options) -> None:
    one, two = Machine(tmp_path / "one", s3_bucket), Machine(tmp_path / "two", s3_bucket)
    published = await one.store(range(1, 6))
    own, folder = two.staged(9)
    two.storage.put(TENANT, own, folder)
    for digest in published:
        await two.blobs.ensure_local(TENANT, digest)
        await one.blobs.delete(TENANT, digest)
    for digest in (own, *published):
        two.unused_for(digest, LONG_AGO)
    assert await two.blobs.evict() == 3
    assert two.storage.exists(TENANT, own)


async def test_without_a_bucket_nothing_is_ever_removed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, None)
    digests = await machine.store(range(1, 6))
    for digest in digests:
        machine.unused_for(digest, LONG_AGO)
    assert await machine.blobs.evict() == 0 and machine.here(digests) == [0, 1, 2, 3, 4]


async def test_a_bucket_that_is_gone_removes_nothing_that_was_not_fetched(tmp_path: Path) -> None:
    gone = S3Options(
        bucket="acme", endpoint="http://127.0.0.1:9", region="x", access_key_id="a", secret_access_key="b"
    )
    machine = Machine(tmp_path, gone, LocalCacheConfig(max_bytes=1, in_use_s=1.0))
    digest, folder = machine.staged(1)
    machine.storage.put(TENANT, digest, folder)
    machine.unused_for(digest, LONG_AGO)
    with pytest.raises(BlobStoreUnavailable):
        await machine.blobs.evict()
    assert machine.here([digest]) == [0]


async def test_a_fetch_brings_the_next_round_at_once(tmp_path: Path, s3_bucket: S3Options) -> None:
    digests = await Machine(tmp_path / "one", s3_bucket).store(range(1, 5))
    machine = Machine(tmp_path / "two", s3_bucket, LocalCacheConfig(max_bytes=2 * SIZE, in_use_s=600.0))
    keeping = asyncio.create_task(machine.blobs.run_eviction())
    for digest in digests[:3]:
        await machine.blobs.ensure_local(TENANT, digest)
        machine.unused_for(digest, LONG_AGO)
    await machine.blobs.ensure_local(TENANT, digests[3])
    async with asyncio.timeout(60):
        while len(machine.here(digests)) > 2:
            await asyncio.sleep(0.02)
    keeping.cancel()
    assert 3 in machine.here(digests)


async def test_concurrent_evictions_count_each_others_removals(tmp_path: Path) -> None:
    machine = Machine(tmp_path, None)
    digests = await machine.store(range(1, 6))
    for age, digest in enumerate(digests):
        machine.unused_for(digest, LONG_AGO + 100 * (5 - age))
    one, other = LocalCache(machine.storage, LIMITS), LocalCache(machine.storage, LIMITS)
    removed: list[int] = []

    async def is_stored(*_: object) -> bool:
        return True

    async def is_stored_after_the_others_round(*_: object) -> bool:
        removed.append(await other.evict(is_stored))
        return True

    removed.append(await one.evict(is_stored_after_the_others_round))
    assert machine.here(digests) == [2, 3, 4] and sum(removed) == 2


async def test_what_is_deleted_during_a_round_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, gone = Machine(tmp_path, None), UUID(int=8)
    digests = await machine.store(range(1, 6))
    for age, digest in enumerate(digests):
        machine.unused_for(digest, LONG_AGO + 100 * (5 - age))
    of_gone, folder = machine.staged(9)
    machine.storage.put(gone, of_gone, folder)
    scandir, exists = os.scandir, machine.storage.exists

    def delete_and_scan(path: Path | int) -> Iterator[os.DirEntry[str]]:
        if isinstance(path, Path) and path.name == str(gone):
            shutil.rmtree(path)
        return scandir(path)

    def exists_until_now(tenant_id: UUID, digest: str) -> bool:
        if was_here := exists(tenant_id, digest) and digest == digests[0]:
            shutil.rmtree(machine.storage.location(tenant_id, digest))
        return was_here or exists(tenant_id, digest)

    async def is_stored(*_: object) -> bool:
        return True

    monkeypatch.setattr("loraplex.adapters.storage.local_store.os.scandir", delete_and_scan)
    monkeypatch.setattr(machine.storage, "exists", exists_until_now)
    assert await LocalCache(machine.storage, LIMITS).evict(is_stored) == 1
    monkeypatch.undo()
    assert machine.here(digests) == [2, 3, 4] and not machine.storage.exists(gone, of_gone)


async def test_a_recently_recorded_use_needs_no_lock(tmp_path: Path, s3_bucket: S3Options) -> None:
    machine = Machine(tmp_path, s3_bucket)
    (digest,) = await machine.store(range(1, 2))
    await machine.blobs.ensure_local(TENANT, digest)
    descriptor = os.open(machine.storage.root / ".eviction.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        await asyncio.wait_for(machine.blobs.ensure_local(TENANT, digest), 60)
        machine.unused_for(digest, USE_RESOLUTION_S + 1)
        noting = asyncio.create_task(machine.blobs.ensure_local(TENANT, digest))
        assert not (await asyncio.wait({noting}, timeout=0.2))[0]
    finally:
        os.close(descriptor)
    await noting
    assert time.time() - machine.storage.path(TENANT, digest).stat().st_mtime < USE_RESOLUTION_S
