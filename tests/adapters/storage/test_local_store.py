"""Blobs are private, atomic, bound to a tenant, and never reached through a link or a crafted name."""

import os
import stat
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from loraplex.adapters.digest import adapter_digest
from loraplex.adapters.errors import BlobCorrupt, BlobMissing, StorageError
from loraplex.adapters.storage.durable_files import write_private
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.adapters.storage.safe_files import copy_opened, open_regular

BASE = "b" * 64
CONFIG, WEIGHTS = b'{"r":8}', b"weights" * 1000


@pytest.fixture
def storage(tmp_path: Path) -> LocalAdapterStore:
    return LocalAdapterStore(tmp_path / "store")


def store(storage: LocalAdapterStore, tenant_id: UUID, tmp_path: Path, weights: bytes = WEIGHTS) -> str:
    source = tmp_path / "weights"
    source.write_bytes(weights)
    with storage.staging() as staged:
        with open_regular(source, max_bytes=1 << 20) as file:
            sha256 = copy_opened(file, staged / "adapter_model.safetensors")
        write_private(staged / "adapter_config.json", CONFIG)
        digest = adapter_digest(CONFIG, sha256, BASE)
        assert storage.put(tenant_id, digest, staged) == storage.path(tenant_id, digest)
    return digest


def left_in_staging(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "store" / ".staging").iterdir())


def test_a_blob_is_private_and_verifies(storage: LocalAdapterStore, tmp_path: Path) -> None:
    tenant_id = uuid4()
    digest = store(storage, tenant_id, tmp_path)
    blob = storage.path(tenant_id, digest)
    assert blob == tmp_path / "store" / str(tenant_id) / digest
    assert (blob / "adapter_model.safetensors").read_bytes() == WEIGHTS
    for path in (tmp_path / "store", blob.parent, blob):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in blob.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    storage.verify(tenant_id, digest, BASE)
    assert left_in_staging(tmp_path) == []


def test_tenants_share_nothing(storage: LocalAdapterStore, tmp_path: Path) -> None:
    first, second = uuid4(), uuid4()
    digest = store(storage, first, tmp_path)
    assert not storage.exists(second, digest)
    assert store(storage, second, tmp_path) == digest
    storage.delete(first, digest)
    assert storage.exists(second, digest) and not storage.exists(first, digest)
    with pytest.raises(BlobMissing):
        storage.path(first, digest)
    with pytest.raises(BlobMissing):
        storage.delete(first, digest)
    assert left_in_staging(tmp_path) == []


def test_an_equal_blob_is_kept_and_a_failed_stage_leaves_nothing(
    storage: LocalAdapterStore, tmp_path: Path
) -> None:
    tenant_id = uuid4()
    digest = store(storage, tenant_id, tmp_path)
    inode = storage.path(tenant_id, digest).stat().st_ino
    assert store(storage, tenant_id, tmp_path) == digest
    assert storage.path(tenant_id, digest).stat().st_ino == inode
    with pytest.raises(RuntimeError), storage.staging() as staged:
        write_private(staged / "adapter_config.json", CONFIG)
        raise RuntimeError("validation failed")
    assert left_in_staging(tmp_path) == []


@pytest.mark.parametrize("damage", ["change", "truncate", "remove", "link", "base"])
def test_damage_is_found(storage: LocalAdapterStore, tmp_path: Path, damage: str) -> None:
    tenant_id = uuid4()
    digest = store(storage, tenant_id, tmp_path)
    file = storage.path(tenant_id, digest) / "adapter_model.safetensors"
    if damage == "change":
        file.write_bytes(WEIGHTS.swapcase())
    elif damage == "truncate":
        os.truncate(file, 10)
    elif damage in ("remove", "link"):
        file.unlink()
    if damage == "link":
        file.symlink_to(tmp_path / "weights")
    with pytest.raises(BlobCorrupt, match=digest):
        storage.verify(tenant_id, digest, "c" * 64 if damage == "base" else BASE)


@pytest.mark.parametrize(
    "digest", ["", "..", "../../etc", "A" * 64, "a" * 63, "a" * 64 + "\n", "/" + "a" * 63]
)
def test_only_digests_name_blobs(storage: LocalAdapterStore, digest: str) -> None:
    with pytest.raises(StorageError, match="64 hexadecimal digits"):
        storage.path(uuid4(), digest)


def test_links_inside_the_storage_are_not_followed(storage: LocalAdapterStore, tmp_path: Path) -> None:
    victim, thief = uuid4(), uuid4()
    digest = store(storage, victim, tmp_path)
    (tmp_path / "store" / str(thief)).symlink_to(tmp_path / "store" / str(victim))
    assert not storage.exists(thief, digest)
    with pytest.raises(StorageError, match="symbolic link"):
        store(storage, thief, tmp_path)


def test_only_the_two_files_are_stored(storage: LocalAdapterStore) -> None:
    with storage.staging() as staged:
        write_private(staged / "adapter_config.json", CONFIG)
        write_private(staged / "adapter_model.bin", b"")
        with pytest.raises(StorageError, match="exactly adapter_config.json and adapter_model.safetensors"):
            storage.put(uuid4(), "a" * 64, staged)


def test_a_tenant_is_deleted_whole_and_others_stay(storage: LocalAdapterStore, tmp_path: Path) -> None:
    assert storage.tenants() == []
    mine, other = uuid4(), uuid4()
    digests = [store(storage, mine, tmp_path, weights) for weights in (b"a" * 9, b"b" * 9)]
    kept = store(storage, other, tmp_path)
    assert sorted(storage.tenants()) == sorted([mine, other])
    storage.delete_tenant(mine)
    storage.delete_tenant(mine)
    assert not any(storage.exists(mine, digest) for digest in digests)
    assert storage.exists(other, kept) and storage.tenants() == [other]
    assert left_in_staging(tmp_path) == []


def test_a_tenants_folder_that_is_a_link_is_not_followed(storage: LocalAdapterStore, tmp_path: Path) -> None:
    mine, other = uuid4(), uuid4()
    kept = store(storage, other, tmp_path)
    (tmp_path / "store" / str(mine)).symlink_to(tmp_path / "store" / str(other))
    storage.delete_tenant(mine)
    assert storage.exists(other, kept)
