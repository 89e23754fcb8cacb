"""Pushing a folder on a real PostgreSQL: with a server that validates and probes, without one, and without a probe."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select
from tests.adapters.storage.folder_removal import remove_from
from tests.adapters.validation.good_folder import CONFIG, MODEL, WEIGHTS, write_good
from tests.adapters.versions.lifecycle_server import BAD_PROBE, BASE_DIGEST, QUICK, Instant, Server

from loraplex.adapters.errors import (
    AdapterRejected,
    BlobStoreUnavailable,
    StorageError,
    StorageFull,
    VersionRejected,
)
from loraplex.adapters.push import FolderPush, PushRequest
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.garbage_collection import remove_files_of
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.adapters.target_modules import BaseModel, adaptable_modules
from loraplex.adapters.validation.own_files import OwnFilesValidation
from loraplex.adapters.versions.pending_folders import PENDING_FOLDER, PendingFolders
from loraplex.engine.fake_engine import FakeScript
from loraplex.engine.messages import ProbeReport
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.actors import Actor
from loraplex.tenants.administration import adapters
from loraplex.tenants.database import Database
from loraplex.tenants.errors import CountReached, InvalidName
from loraplex.tenants.models import Adapter, AuditEntry
from loraplex.tenants.names import check_adapter_name
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.registry import use_cases as aliases
from loraplex.tenants.registry.adapters import AdapterRepository, profile_of
from loraplex.tenants.registry.records import AdapterProfile
from loraplex.tenants.registry.resolution import ModelResolver
from loraplex.tenants.unit_of_work import unit_of_work

USER = Actor("command", "ada")


@dataclass
class Home:
    """A data directory with the tenant `acme`."""

    database: Database
    root: Path
    tenant_id: UUID

    def __post_init__(self) -> None:
        self.storage = LocalAdapterStore(self.root / "adapters")
        self.push = FolderPush(
            self.database,
            lambda tenant_id: unit_of_work(self.database, USER, tenant_id, None),
            BlobStore(self.storage, None, BASE_DIGEST),
            OwnFilesValidation(BaseModel(adaptable_modules(MODEL), BASE_DIGEST)),
            base_model="base",
        )

    def folder(self, alpha: int = 8) -> Path:
        """A good folder, with a digest of its own for each `alpha`."""
        folder = self.root / f"folder{alpha}"
        if not folder.exists():
            write_good(folder)
            config = json.loads((folder / CONFIG).read_text()) | {"lora_alpha": alpha}
            (folder / CONFIG).write_text(json.dumps(config))
        return folder

    def request(self, alpha: int = 8, name: str = "voice", **options: Any) -> PushRequest:
        return PushRequest(name=name, folder=self.folder(alpha), **options)

    @asynccontextmanager
    async def server(self, report: ProbeReport | None = None) -> AsyncIterator[Server]:
        """A running server on this data directory. `report`: the result of its probes."""
        server = Server(self.database, self.storage.root, Instant(), replace(QUICK, resume_s=0.02))
        if report is not None:
            server.engine.script = FakeScript(probe=report)
        running = asyncio.create_task(server.lifecycle.run())
        async with asyncio.timeout(60):
            while not PendingFolders(self.storage.root).is_watched():
                await asyncio.sleep(0.01)
        try:
            yield server
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.lifecycle.close()

    async def entries(self) -> list[tuple[str, str, str, Any]]:
        """The tenant's audit entries, oldest first."""
        async with self.database.as_tenant(self.tenant_id) as session:
            rows = await session.scalars(select(AuditEntry).order_by(AuditEntry.id))
            return [(row.action, row.actor_kind, row.actor, row.after) for row in rows]

    async def resolved(self, model: str, tenant_id: UUID | None = None) -> tuple[int, str] | None:
        async with self.database.as_operator() as session:
            found = await ModelResolver(session, tenant_id or self.tenant_id).resolve(model)
        return None if found is None else (found.version, found.digest)

    async def delete(self, name: str, tenant_id: UUID | None = None) -> None:
        owner = tenant_id or self.tenant_id
        async with unit_of_work(self.database, USER, owner, None) as uow:
            adapter_id = await adapters.force_delete(uow, owner, name)
        await remove_files_of(self.database, remove_from(self.storage), adapter_id)

    async def names(self) -> list[str]:
        async with self.database.as_tenant(self.tenant_id) as session:
            return [adapter.name for adapter in await AdapterRepository(session, self.tenant_id).list()]

    def left(self) -> list[str]:
        """Files that no version needs."""
        folders = (self.storage.root / ".staging", self.storage.root / PENDING_FOLDER)
        return [path.name for folder in folders if folder.exists() for path in folder.iterdir()]


async def make_tenant(database: Database, name: str) -> UUID:
    async with database.as_operator() as session:
        return (await TenantRepository(session).create(name)).id


@pytest.fixture
async def home(database: Database, tmp_path: Path) -> Home:
    return Home(database, tmp_path, await make_tenant(database, "acme"))


async def test_a_server_validates_and_probes(home: Home) -> None:
    async with home.server() as server:
        pushed = await home.push.push(home.tenant_id, home.request())
    assert (pushed.state, pushed.version, pushed.promoted) == ("ready", 1, True)
    assert [probed.digest for probed in server.engine.probed] == [pushed.digest]
    assert pushed.report.checks[-1].name == "probe"
    assert await home.resolved("voice") == (1, pushed.digest)
    size = (home.folder() / WEIGHTS).stat().st_size
    assert await home.entries() == [
        ("adapter.create", "command", "ada", {"name": "voice", "description": ""}),
        ("version.create", "command", "ada", {"state": "validating", "size_bytes": size}),
        ("version.accept", "system", "validation", {"state": "ready", "digest": pushed.digest}),
        ("alias.create", "command", "ada", {"targets": {"1": 100}}),
    ]
    assert home.left() == ["gateways.lock"]


async def test_what_the_probe_rejects_is_not_served(home: Home) -> None:
    async with home.server(BAD_PROBE):
        with pytest.raises(VersionRejected, match="q_proj differs") as refused:
            await home.push.push(home.tenant_id, home.request())
    assert refused.value.check == "probe" and not refused.value.report.passed
    assert await home.resolved("voice") is None
    assert [entry[0] for entry in await home.entries()][-2:] == ["version.create", "version.reject"]


async def test_without_a_server_the_next_start_probes(home: Home) -> None:
    waiting = await home.push.push(home.tenant_id, home.request())
    assert (waiting.state, waiting.promoted) == ("validating", False)
    assert waiting.report.passed and waiting.digest is not None, "validated here"
    assert await home.resolved("voice@1") is None
    next_start = Server(home.database, home.storage.root, Instant())
    await next_start.sweep()
    await next_start.lifecycle.settled()
    assert len(next_start.engine.probed) == 1
    found = await home.resolved("voice@1")
    assert found is not None and found[0] == 1


async def test_a_server_that_ends_leaves_the_version_to_the_next_one(home: Home) -> None:
    async with home.server() as server:
        server.validation.gate.clear()
        pushing = asyncio.create_task(home.push.push(home.tenant_id, home.request()))
        async with asyncio.timeout(60):
            while not server.validation.folders:
                await asyncio.sleep(0.01)
    pushed = await pushing
    assert (pushed.state, pushed.digest, pushed.promoted) == ("validating", None, False)
    (pending,) = PendingFolders(home.storage.root).abandoned()
    pending.discard()


async def test_a_server_of_another_database_is_no_endless_wait(home: Home) -> None:
    folders = PendingFolders(home.storage.root)
    with folders.watched():
        pushing = asyncio.create_task(home.push.push(home.tenant_id, home.request()))
        async with asyncio.timeout(60):
            while not pushing.done():
                for unknown in folders.abandoned():
                    unknown.discard()
                await asyncio.sleep(0.01)
    with pytest.raises(StorageError, match="uses another database"):
        await pushing


async def test_versions_and_promotion_without_a_probe(home: Home) -> None:
    push, tenant_id = home.push.push_unprobed, home.tenant_id
    first = await push(tenant_id, home.request(1, promote="first"))
    assert (first.version, first.promoted, first.rank, first.state) == (1, True, 4, "ready")
    second = await push(tenant_id, home.request(2, promote="first"))
    assert (second.version, second.promoted) == (2, False) and second.digest != first.digest
    assert await home.resolved("voice") == (1, first.digest)
    third = await push(tenant_id, home.request(3))
    assert await home.resolved("voice:production") == (3, third.digest)
    assert await home.resolved("voice@2") == (2, second.digest)
    for pushed in (first, second, third):
        home.storage.verify(tenant_id, pushed.digest or "", BASE_DIGEST)
    again = await push(tenant_id, home.request(1))
    assert (again.version, again.digest) == (1, first.digest)
    assert await home.resolved("voice") == (1, first.digest)
    assert home.left() == []


async def test_a_repeated_push_promotes_the_version_of_an_interrupted_one(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(*_: object) -> bool:
        raise asyncio.CancelledError

    with monkeypatch.context() as interrupted, pytest.raises(asyncio.CancelledError):
        interrupted.setattr(FolderPush, "_promote", end)
        await home.push.push_unprobed(home.tenant_id, home.request(promote="first"))
    assert await home.resolved("voice") is None
    again = await home.push.push_unprobed(home.tenant_id, home.request(promote="first"))
    assert (again.version, again.promoted) == (1, True)
    assert await home.resolved("voice") == (1, again.digest)


async def test_a_deleted_production_is_not_made_again(home: Home) -> None:
    await home.push.push_unprobed(home.tenant_id, home.request(promote="first"))
    async with unit_of_work(home.database, USER, home.tenant_id, None) as uow:
        await aliases.delete(uow, home.tenant_id, "voice", "production")
    again = await home.push.push_unprobed(home.tenant_id, home.request(promote="first"))
    assert (again.version, again.promoted) == (1, False)


async def test_a_version_that_waits_for_a_server_stops_no_push(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise BlobStoreUnavailable("the bucket does not answer")

    with monkeypatch.context() as interrupted, pytest.raises(BlobStoreUnavailable):
        interrupted.setattr(BlobStore, "store", fail)
        await home.push.push_unprobed(home.tenant_id, home.request(promote="first"))
    again = await home.push.push_unprobed(home.tenant_id, home.request(promote="first"))
    assert (again.version, again.state, again.promoted) == (2, "ready", True)
    assert await home.resolved("voice") == (2, again.digest)


async def test_a_rejected_version_is_not_the_first(home: Home) -> None:
    async with home.server(BAD_PROBE) as server:
        with pytest.raises(VersionRejected):
            await home.push.push(home.tenant_id, home.request(1, promote="first"))
        server.engine.script = FakeScript()
        pushed = await home.push.push(home.tenant_id, home.request(2, promote="first"))
    assert (pushed.version, pushed.promoted) == (2, True)


async def test_a_skipped_probe_is_in_the_audit_log_and_in_the_report(home: Home) -> None:
    pushed = await home.push.push_unprobed(home.tenant_id, home.request(promote="never"))
    made = next(after for action, _, _, after in await home.entries() if action == "version.create")
    assert made["probed"] is False
    last = pushed.report.checks[-1]
    assert (last.name, last.passed, last.warning) == ("probe", True, True)
    async with home.database.as_operator() as session:
        (version,) = await AdapterRepository(session, home.tenant_id).versions("voice")
    assert version.report == {"checks": pushed.report.as_dicts()} and len(version.report["checks"]) == 13
    assert version.config is not None and version.config["r"] == 4 and version.created_by == "ada"


async def test_a_profile_is_that_of_the_version(home: Home) -> None:
    markers = {"start": "<plan>", "end": "</plan>"}
    hermes = AdapterProfile("hermes", {"temperature": 0.2}, markers, {"read": "values"})
    mistral = AdapterProfile("mistral")
    push = home.push.push_unprobed
    first = await push(home.tenant_id, home.request(profile=hermes, promote="never"))
    changed = await push(home.tenant_id, home.request(profile=mistral))
    assert changed.version == first.version, "it had no alias yet"
    assert (await push(home.tenant_id, home.request(profile=hermes))).version == 2
    async with home.database.as_operator() as session:
        versions = await AdapterRepository(session, home.tenant_id).versions("voice")
    assert [profile_of(each) for each in versions] == [mistral, hermes]
    assert [entry[0] for entry in await home.entries()].count("version.change") == 3


async def test_equal_content_of_two_tenants_is_stored_twice(home: Home) -> None:
    bolt = await make_tenant(home.database, "bolt")
    digest = (await home.push.push_unprobed(home.tenant_id, home.request())).digest or ""
    assert await home.resolved("voice", bolt) is None and not home.storage.exists(bolt, digest)
    assert (await home.push.push_unprobed(bolt, home.request())).digest == digest
    await home.delete("voice")
    assert home.storage.exists(bolt, digest) and not home.storage.exists(home.tenant_id, digest)
    assert await home.resolved("voice") is None
    assert await home.resolved("voice", bolt) == (1, digest)


async def test_deleting_keeps_blobs_of_other_adapters(home: Home) -> None:
    digest = (await home.push.push_unprobed(home.tenant_id, home.request(name="one"))).digest or ""
    await home.push.push_unprobed(home.tenant_id, home.request(name="two"))
    await home.delete("one")
    assert home.storage.exists(home.tenant_id, digest)
    await home.delete("two")
    assert not home.storage.exists(home.tenant_id, digest)


@pytest.mark.parametrize("fault", ["pickle", "config link", "weights link", "no folder", "tensors"])
async def test_a_refused_adapter_leaves_nothing(home: Home, tmp_path: Path, fault: str) -> None:
    folder = home.folder()
    weights, config = folder / WEIGHTS, folder / CONFIG
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
    for push in (home.push.push, home.push.push_unprobed):
        with pytest.raises(AdapterRejected, match=message):
            await push(home.tenant_id, PushRequest(name="voice", folder=folder))
    assert await home.names() == [] and await home.entries() == [] and home.left() == []


async def test_bytes_beyond_the_quota_leave_nothing(home: Home) -> None:
    async with home.database.as_operator() as session:
        quotas = QuotaRepository(session, home.tenant_id)
        row = await quotas.locked(await quotas.tenant())
        await quotas.set(row, QuotaLimits(max_adapter_bytes=100))
    for push in (home.push.push, home.push.push_unprobed):
        with pytest.raises(CountReached, match="max_adapter_bytes"):
            await push(home.tenant_id, home.request())
    assert await home.names() == [] and await home.entries() == [] and home.left() == []


async def test_a_version_without_a_commit_leaves_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise CountReached("max_adapters", "late")

    monkeypatch.setattr("loraplex.tenants.administration.versions.change_profile", fail)
    for push in (home.push.push, home.push.push_unprobed):
        with pytest.raises(CountReached):
            await push(home.tenant_id, home.request(profile=AdapterProfile("hermes")))
    assert await home.names() == [] and home.left() == []


async def test_the_free_space_floor_counts_the_files(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = (home.folder() / WEIGHTS).stat().st_size
    free = SimpleNamespace(f_bavail=2 * weights - 1, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    monkeypatch.setattr(home.push, "_storage_floor_bytes", weights)
    with pytest.raises(StorageFull):
        await home.push.push(home.tenant_id, home.request())
    assert home.left() == [] and await home.names() == []


async def test_a_file_that_shrinks_while_it_is_copied_is_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrink(*_: object, **__: object) -> bytes:
        raise EOFError("the file ends 4 bytes early")

    monkeypatch.setattr("loraplex.adapters.push.copy_opened", shrink)
    with pytest.raises(AdapterRejected, match="changed while it was read"):
        await home.push.push(home.tenant_id, home.request())
    assert home.left() == []


async def test_another_user_than_the_servers_leaves_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.storage.root.mkdir()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for push in (home.push.push, home.push.push_unprobed):
        with pytest.raises(StorageError, match=f"belongs to the user with uid {owner}"):
            await push(home.tenant_id, home.request())
    assert await home.names() == [] and home.left() == []


@pytest.mark.parametrize(
    "name", ["", "Voice", "a:b", "a@1", "a/b", "../a", ".a", "-a", "a b", "a\n", "a" * 64, "é"]
)
async def test_names(home: Home, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidName, match="is not allowed: 1-63"):
        await home.push.push(home.tenant_id, PushRequest(name=name, folder=tmp_path))


async def test_no_new_adapter_has_the_base_models_name(home: Home) -> None:
    with pytest.raises(InvalidName, match="is that of the base model"):
        await home.push.push(home.tenant_id, home.request(name="base"))
    async with home.database.as_tenant(home.tenant_id) as session:
        session.add(Adapter(tenant_id=home.tenant_id, name="base", description=""))
    assert (await home.push.push_unprobed(home.tenant_id, home.request(name="base"))).version == 1


def test_the_longest_name() -> None:
    check_adapter_name("a" * 63)
    check_adapter_name("0.9_b-c")
