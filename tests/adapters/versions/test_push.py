"""Pushing on a real PostgreSQL: versions, promotion, equal content, and nothing registered when refused."""

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from peft import PeftModel

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.storage.garbage_collection import remove_from
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.adapters.versions.push import AdapterRegistry, delete_adapter
from loraplex.engine.models.config import ModelConfig
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import AdapterNotFound, InvalidName
from loraplex.tenants.names import check_adapter_name
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.resolution import ModelResolver

PeftFactory = Callable[..., tuple[PeftModel, Path]]
BASE = "b" * 64


@pytest.fixture
def storage(tmp_path: Path) -> LocalAdapterStore:
    return LocalAdapterStore(tmp_path / "store")


@pytest.fixture
def registry(database: Database, storage: LocalAdapterStore, model_config: ModelConfig) -> AdapterRegistry:
    return AdapterRegistry(database, storage, model_config, BASE)


async def make_tenant(database: Database, name: str) -> UUID:
    async with database.as_operator() as session:
        return (await TenantRepository(session).create(name)).id


async def resolved(database: Database, tenant_id: UUID, model: str) -> tuple[int, str] | None:
    async with database.as_operator() as session:
        found = await ModelResolver(session, tenant_id).resolve(model)
    return None if found is None else (found.version, found.digest)


async def test_versions_and_promotion(
    database: Database, storage: LocalAdapterStore, registry: AdapterRegistry, peft_adapter: PeftFactory
) -> None:
    tenant_id = await make_tenant(database, "acme")
    folders = [peft_adapter(f"v{'i' * n}", r=4, target_modules=["q_proj"])[1] for n in range(3)]
    first = await registry.push(tenant_id, "voice", folders[0], promote="first")
    assert (first.version, first.promoted, first.rank) == (1, True, 4)
    assert await resolved(database, tenant_id, "voice") == (1, first.digest)
    second = await registry.push(tenant_id, "voice", folders[1], promote="first")
    assert (second.version, second.promoted) == (2, False) and second.digest != first.digest
    assert await resolved(database, tenant_id, "voice") == (1, first.digest)
    third = await registry.push(tenant_id, "voice", folders[2])
    assert await resolved(database, tenant_id, "voice:production") == (3, third.digest)
    assert await resolved(database, tenant_id, "voice@2") == (2, second.digest)
    for pushed in (first, second, third):
        storage.verify(tenant_id, pushed.digest, BASE)
    again = await registry.push(tenant_id, "voice", folders[0])
    assert (again.version, again.digest) == (1, first.digest)
    assert await resolved(database, tenant_id, "voice") == (1, first.digest)


async def test_the_report_is_kept(
    database: Database, registry: AdapterRegistry, peft_adapter: PeftFactory
) -> None:
    tenant_id = await make_tenant(database, "acme")
    pushed = await registry.push(tenant_id, "voice", peft_adapter(r=4, target_modules="all-linear")[1])
    async with database.as_operator() as session:
        (version,) = await AdapterRepository(session, tenant_id).versions("voice")
    assert version.report == {"checks": pushed.report.as_dicts()} and len(version.report["checks"]) == 12
    assert version.config is not None and version.config["r"] == 4 and version.state == "ready"


async def test_equal_content_of_two_tenants_is_stored_twice(
    database: Database, storage: LocalAdapterStore, registry: AdapterRegistry, peft_adapter: PeftFactory
) -> None:
    acme, bolt = await make_tenant(database, "acme"), await make_tenant(database, "bolt")
    _, folder = peft_adapter(r=4, target_modules=["q_proj"])
    digest = (await registry.push(acme, "voice", folder)).digest
    assert await resolved(database, bolt, "voice") is None and not storage.exists(bolt, digest)
    assert (await registry.push(bolt, "voice", folder)).digest == digest
    await delete_adapter(database, remove_from(storage), acme, "voice")
    assert storage.exists(bolt, digest) and not storage.exists(acme, digest)
    assert await resolved(database, acme, "voice") is None
    assert await resolved(database, bolt, "voice") == (1, digest)


async def test_deleting_keeps_blobs_of_other_adapters(
    database: Database, storage: LocalAdapterStore, registry: AdapterRegistry, peft_adapter: PeftFactory
) -> None:
    tenant_id = await make_tenant(database, "acme")
    _, folder = peft_adapter(r=4, target_modules=["q_proj"])
    digest = (await registry.push(tenant_id, "one", folder)).digest
    await registry.push(tenant_id, "two", folder)
    await delete_adapter(database, remove_from(storage), tenant_id, "one")
    assert storage.exists(tenant_id, digest)
    await delete_adapter(database, remove_from(storage), tenant_id, "two")
    assert not storage.exists(tenant_id, digest)
    with pytest.raises(AdapterNotFound):
        await delete_adapter(database, remove_from(storage), tenant_id, "two")


@pytest.mark.parametrize("fault", ["pickle", "config link", "weights link", "no folder", "tensors"])
async def test_a_refused_adapter_leaves_nothing(
    database: Database, registry: AdapterRegistry, peft_adapter: PeftFactory, tmp_path: Path, fault: str
) -> None:
    tenant_id = await make_tenant(database, "acme")
    _, folder = peft_adapter(r=4, target_modules=["q_proj"])
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    if fault == "pickle":
        weights.rename(folder / "adapter_model.bin")
        message = "adapter_model.bin: is a pickle"
    elif fault == "config link":
        config.rename(tmp_path / "elsewhere")
        config.symlink_to(tmp_path / "elsewhere")
        message = "adapter_config.json: is a symbolic link"
    elif fault == "weights link":
        weights.rename(tmp_path / "elsewhere")
        weights.symlink_to(tmp_path / "elsewhere")
        message = "adapter_model.safetensors: is a symbolic link"
    elif fault == "no folder":
        folder = config
        message = "is not a folder of adapter_config.json and adapter_model.safetensors"
    else:
        config.write_text(config.read_text().replace('"r": 4', '"r": 5'))
        message = "adapter_config.json says 5"
    with pytest.raises(AdapterRejected, match=message):
        await registry.push(tenant_id, "voice", folder)
    async with database.as_operator() as session:
        assert await AdapterRepository(session, tenant_id).list() == []
    staging = tmp_path / "store" / ".staging"
    assert not (tmp_path / "store" / str(tenant_id)).exists() and not (
        staging.exists() and list(staging.iterdir())
    )


@pytest.mark.parametrize(
    "name", ["", "Voice", "a:b", "a@1", "a/b", "../a", ".a", "-a", "a b", "a\n", "a" * 64, "é"]
)
async def test_names(registry: AdapterRegistry, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidName, match="is not allowed: 1-63"):
        await registry.push(UUID(int=0), name, tmp_path)


def test_the_longest_name() -> None:
    check_adapter_name("a" * 63)
    check_adapter_name("0.9_b-c")


async def test_files_removed_before_their_version_is_written_are_stored_again(
    database: Database,
    storage: LocalAdapterStore,
    registry: AdapterRegistry,
    peft_adapter: PeftFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tenant_id = await make_tenant(database, "acme")
    folder = peft_adapter(r=4, target_modules="all-linear")[1]
    await registry.push(tenant_id, "voice", folder)
    take = storage.put
    removed: list[str] = []

    def put(owner: UUID, digest: str, staged: Path) -> Path:
        """The first time the blob goes right after it was found there, as when its last version is deleted."""
        stored = take(owner, digest, staged)
        if not removed:
            removed.append(digest)
            storage.delete(owner, digest)
        return stored

    monkeypatch.setattr(storage, "put", put)
    again = await registry.push(tenant_id, "other", folder)
    assert removed == [again.digest]
    storage.verify(tenant_id, again.digest, BASE)
