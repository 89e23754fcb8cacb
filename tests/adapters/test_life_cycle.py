"""From an uploaded folder to a version that serves or tells why not: real database and processes, a scripted engine."""

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select, text
from tests.adapters.bad_uploads import CONFIG, LIMITS, MODEL, WEIGHTS, config, write_good

from loraplex.adapters.errors import BlobMissing, ValidationUnavailable
from loraplex.adapters.held_uploads import HELD_FOLDER, HeldUploads
from loraplex.adapters.life_cycle import VersionLifeCycle
from loraplex.adapters.modules import adaptable_modules
from loraplex.adapters.report import Check, ValidationReport
from loraplex.adapters.storage import AdapterStorage
from loraplex.adapters.validation_process import ValidationProcesses
from loraplex.adapters.verdict import Validated, Verdict
from loraplex.adapters.version_work import LifeCycleLimits, VersionWork
from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.engine.messages import AdapterRef, ProbeReport
from loraplex.tenants.accounts import TenantRepository
from loraplex.tenants.adapters import AdapterRepository
from loraplex.tenants.audit import Actor
from loraplex.tenants.database import Database
from loraplex.tenants.deletion import TenantDeletions
from loraplex.tenants.errors import AdapterNotFound
from loraplex.tenants.models import AdapterVersion, AuditEntry

BASE_DIGEST = "b" * 64
ACTOR = Actor("key", "abc123")
QUICK = LifeCycleLimits(retry_s=0.01, max_retry_s=0.05, max_waiting_per_tenant=2, max_waiting=3)
BAD_PROBE = ProbeReport(
    digest="", max_error={"q_proj": 0.5}, bound=0.01, code="adapter_inexact", message="q_proj differs"
)


def namespace_of(tenant_id: UUID) -> bytes:
    return hashlib.sha256(tenant_id.bytes).digest()


class LocalStore:
    """The local folder, which may be out of order."""

    def __init__(self, storage: AdapterStorage) -> None:
        self.storage = storage
        self.failures = 0

    async def store(self, tenant_id: UUID, digest: str, staged: Path) -> Path:
        if self.failures:
            self.failures -= 1
            raise BlobMissing("the disk is full")
        return self.storage.put(tenant_id, digest, staged)

    async def ensure_local(self, tenant_id: UUID, digest: str) -> Path:
        return self.storage.path(tenant_id, digest)


class Instant:
    """Validates at once, or when `gate` opens."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = 0
        self.folders: list[Path] = []

    async def validate(self, tenant_id: UUID, folder: Path) -> Verdict:
        self.folders.append(folder)
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise ValidationUnavailable("no process today")
        content = (folder / WEIGHTS).read_bytes() + (folder / CONFIG).read_bytes()
        return Validated(
            digest=hashlib.sha256(content).hexdigest(),
            rank=4,
            config={"r": 4},
            canonical=b"{}",
            size_bytes=len(content),
            report=ValidationReport((Check("files", True, "there"),)),
        )


class Server:
    """One process's life cycle on a storage."""

    def __init__(
        self, database: Database, root: Path, validation: Any, limits: LifeCycleLimits = QUICK
    ) -> None:
        self.root = root
        self.database = database
        self.storage = AdapterStorage(root)
        self.store = LocalStore(self.storage)
        self.engine = FakeEngine()
        self.validation = validation
        work = VersionWork(database, validation, self.engine, self.store, namespace_of, limits)
        self.refused: list[tuple[bytes, str]] = []
        self.life_cycle = VersionLifeCycle(database, work, HeldUploads(root), limits, lambda: self.refused)

    def staged(self, spoil: Callable[[Path], object] | None = None) -> Path:
        with self.storage.staging() as folder:
            pass
        write_good(folder)
        if spoil is not None:
            spoil(folder)
        return folder

    async def begin(self, tenant_id: UUID, spoil: Callable[[Path], object] | None = None) -> AdapterVersion:
        return await self.life_cycle.begin(tenant_id, "voice", self.staged(spoil), actor=ACTOR)

    async def version(self, record: AdapterVersion) -> AdapterVersion:
        await asyncio.wait_for(self.life_cycle.settled(), 60)
        return await version_of(self.database, record)

    def held(self) -> list[str]:
        folder = self.root / HELD_FOLDER
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


async def version_of(database: Database, record: AdapterVersion) -> AdapterVersion:
    async with database.as_tenant(record.tenant_id) as session:
        return (await session.scalars(select(AdapterVersion).where(AdapterVersion.id == record.id))).one()


async def actions(database: Database, tenant_id: UUID) -> list[tuple[str, str]]:
    async with database.as_tenant(tenant_id) as session:
        rows = await session.scalars(select(AuditEntry).order_by(AuditEntry.id))
        return [(row.action, row.actor) for row in rows]


@pytest.fixture
async def tenant_id(database: Database) -> UUID:
    async with database.as_operator() as session:
        owner = await TenantRepository(session).create("acme")
        await AdapterRepository(session, owner.id).get_or_create("voice")
        return owner.id


@pytest.fixture
async def server(database: Database, tmp_path: Path) -> AsyncIterator[Server]:
    """With validation that takes no time."""
    made = Server(database, tmp_path / "adapters", Instant())
    yield made
    await made.life_cycle.close()


async def test_an_upload_is_validated_tried_stored_and_ready(
    database: Database, tenant_id: UUID, tmp_path: Path
) -> None:
    """By a real process."""
    processes = ValidationProcesses(
        adaptable_modules(MODEL).values(),
        BASE_DIGEST,
        environment=dict(os.environ),
        adapter_limits=LIMITS,
    )
    server = Server(database, tmp_path / "adapters", processes)
    begun = await server.begin(tenant_id)
    assert (begun.state, begun.version, begun.digest, begun.created_by) == ("validating", 1, None, "abc123")
    bad = await server.begin(tenant_id, config(use_dora=True))
    ready, rejected = await server.version(begun), await server.version(bad)

    assert ready.state == "ready" and ready.rank == 4 and ready.digest is not None
    server.storage.verify(tenant_id, ready.digest, BASE_DIGEST)
    names = [check["name"] for check in ready.report["checks"]]
    assert names[:3] == ["files", "manifest", "header"] and names[-1] == "canary"
    (probed,) = server.engine.probed
    assert (probed.namespace, probed.digest) == (namespace_of(tenant_id), ready.digest)

    assert (rejected.state, rejected.version, rejected.digest) == ("rejected", 2, None)
    failed = rejected.report["checks"][-1]
    assert (failed["name"], failed["passed"]) == ("manifest", False) and "DoRA" in failed["detail"]
    assert server.held() == []
    assert sorted(await actions(database, tenant_id)) == [
        ("version.accept", "validation"),
        ("version.create", "abc123"),
        ("version.create", "abc123"),
        ("version.reject", "validation"),
    ]


async def test_the_engine_has_the_canonical_files(server: Server, tenant_id: UUID) -> None:
    seen: list[bytes] = []
    probe = server.engine.probe

    async def look(adapter: AdapterRef) -> ProbeReport:
        seen.append(Path(adapter.blob_path, CONFIG).read_bytes())
        assert Path(adapter.blob_path, WEIGHTS).is_file()
        return await probe(adapter)

    server.engine.probe = look  # type: ignore[method-assign]
    ready = await server.version(await server.begin(tenant_id))
    assert seen == [b"{}"] and ready.state == "ready"
    assert ready.digest is not None
    assert (server.storage.path(tenant_id, ready.digest) / CONFIG).read_bytes() == b"{}"


async def test_a_failing_canary_rejects_with_the_figures(server: Server, tenant_id: UUID) -> None:
    server.engine.script = FakeScript(probe=BAD_PROBE)
    rejected = await server.version(await server.begin(tenant_id))
    assert rejected.state == "rejected"
    failed = rejected.report["checks"][-1]
    assert failed["name"] == "canary" and not failed["passed"]
    assert "q_proj differs" in failed["detail"] and "q_proj 0.5; allowed: 0.01" in failed["detail"]
    assert not list(server.root.glob("*/*/*")), "nothing was stored"


async def test_an_adapter_without_effect_is_warned_about(server: Server, tenant_id: UUID) -> None:
    server.engine.script = FakeScript(probe=ProbeReport(digest="", modules=2, max_error={"q_proj": 0.0}))
    ready = await server.version(await server.begin(tenant_id))
    assert ready.state == "ready" and ready.report["checks"][-1]["warning"]


async def test_what_is_not_the_adapters_fault_is_tried_again(server: Server, tenant_id: UUID) -> None:
    server.validation.failures, server.store.failures = 2, 2
    failures, probe = 2, server.engine.probe

    async def unsteady(adapter: AdapterRef) -> ProbeReport:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise EngineUnavailable("the engine starts")
        return await probe(adapter)

    server.engine.probe = unsteady  # type: ignore[method-assign]
    ready = await server.version(await server.begin(tenant_id))
    assert ready.state == "ready"
    assert len(server.validation.folders) == 3 and len(server.engine.probed) == 1, "nothing is done twice"


async def test_a_deleted_tenants_uploads_wait_no_longer(server: Server, tenant_id: UUID) -> None:
    server.validation.failures = 10**6
    await server.begin(tenant_id)
    async with server.database.as_operator() as session:
        deletions = TenantDeletions(session)
        await deletions.begin(tenant_id)
        assert await deletions.erase_rows(tenant_id, 1000)
    await asyncio.wait_for(server.life_cycle.settled(), 20)
    assert server.held() == []


async def test_patience_ends(database: Database, tenant_id: UUID, tmp_path: Path) -> None:
    limits = LifeCycleLimits(retry_s=0.01, give_up_s=0.2)
    server = Server(database, tmp_path / "adapters", Instant(), limits)
    server.validation.failures = 10**6
    rejected = await server.version(await server.begin(tenant_id))
    assert rejected.state == "rejected"
    assert "could not be validated in time" in rejected.report["checks"][-1]["detail"]
    assert server.held() == []


async def test_only_so_many_wait(server: Server, database: Database, tenant_id: UUID) -> None:
    server.validation.gate.clear()
    for _ in range(2):
        await server.begin(tenant_id)
    with pytest.raises(ValidationUnavailable, match="2 versions of this tenant"):
        await server.begin(tenant_id)
    async with database.as_operator() as session:
        others = [(await TenantRepository(session).create(name)).id for name in ("bolt", "cask")]
        for other in others:
            await AdapterRepository(session, other).get_or_create("voice")
    await server.begin(others[0])
    with pytest.raises(ValidationUnavailable, match="3 versions wait"):
        await server.begin(others[1])
    server.validation.gate.set()
    await server.life_cycle.settled()
    await server.version(await server.begin(others[1]))


async def test_an_adapter_that_does_not_exist_leaves_nothing(server: Server, tenant_id: UUID) -> None:
    staged = server.staged()
    with pytest.raises(AdapterNotFound):
        await server.life_cycle.begin(tenant_id, "nobody", staged)
    assert not staged.exists() and server.held() == []


async def test_a_version_that_is_deleted_meanwhile_is_let_be(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    server.validation.gate.clear()
    begun = await server.begin(tenant_id)
    async with database.as_tenant(tenant_id) as session:
        await session.execute(text("UPDATE adapter_versions SET state = 'deleting'"))
    server.validation.gate.set()
    assert (await server.version(begun)).state == "deleting"
    assert server.held() == []


async def test_what_a_closed_server_left_is_taken_up_by_another(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    server.validation.gate.clear()
    begun = await server.begin(tenant_id)
    other = Server(database, server.root, Instant())
    await other.life_cycle.sweep()
    assert other.validation.folders == [], "its holder lives"
    await server.life_cycle.close()
    assert (await version_of(database, begun)).state == "validating"
    await other.life_cycle.sweep()
    assert (await other.version(begun)).state == "ready"
    assert other.held() == []


DYING_HOLDER = """
import sys, time
from pathlib import Path
from uuid import UUID
from loraplex.adapters.held_uploads import HeldUploads

held = HeldUploads(Path(sys.argv[1])).hold(Path(sys.argv[2]), UUID(sys.argv[3]))
print("held", flush=True)
time.sleep(60)
"""


async def test_a_killed_servers_upload_is_taken_up(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    server.validation.gate.clear()
    begun = await server.begin(tenant_id)
    await server.life_cycle.close()
    staged, folder = server.staged(), server.root / HELD_FOLDER / begun.id.hex
    os.rename(folder, staged.parent / "kept")
    command = [
        sys.executable,
        "-c",
        DYING_HOLDER,
        str(server.root),
        str(staged.parent / "kept"),
        str(begun.id),
    ]
    holder = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert holder.stdout is not None and await holder.stdout.readline() == b"held\n"
    other = Server(database, server.root, Instant())
    await other.life_cycle.sweep()
    assert (await other.version(begun)).state == "validating"
    holder.kill()
    await holder.wait()
    await other.life_cycle.sweep()
    assert (await other.version(begun)).state == "ready"


async def test_versions_whose_files_are_gone_are_rejected(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    server.validation.gate.clear()
    begun = await server.begin(tenant_id)
    await server.life_cycle.close()
    for path in (server.root / HELD_FOLDER / begun.id.hex).iterdir():
        path.unlink()
    (server.root / HELD_FOLDER / begun.id.hex).rmdir()
    await server.life_cycle.sweep()
    rejected = await server.version(begun)
    assert rejected.state == "rejected" and "upload it again" in rejected.report["checks"][-1]["detail"]

    elsewhere = await server.begin(tenant_id)
    await server.life_cycle.close()
    far = Server(database, server.root.parent / "other disk", Instant(), LifeCycleLimits(give_up_s=-1.0))
    await far.life_cycle.sweep()
    assert (await far.version(elsewhere)).state == "rejected"
    await server.life_cycle.sweep()
    assert server.held() == [], "nobody needs its files"


async def test_a_server_that_dies_with_the_files_stored_leaves_one_step(
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
    await asyncio.wait_for(stored.wait(), 10)
    noted = await version_of(database, begun)
    assert noted.state == "validating" and noted.digest is not None, "who removes files sees it"
    await server.life_cycle.close()
    other = Server(database, server.root, Instant())
    await other.life_cycle.sweep()
    ready = await other.version(begun)
    assert ready.state == "ready" and ready.report["checks"][-1]["name"] == "canary"
    assert other.validation.folders == [] and other.held() == []


async def test_quarantine_reaches_every_version_of_the_weights(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    ready = await server.version(await server.begin(tenant_id))
    again = await server.version(await server.begin(tenant_id))
    assert ready.digest is not None and ready.digest == again.digest
    assert await server.life_cycle.quarantine(tenant_id, ready.digest, "three rows were not finite") == 2
    assert await server.life_cycle.quarantine(tenant_id, ready.digest, "again") == 0
    assert await server.life_cycle.quarantine(uuid4(), ready.digest, "another tenant's") == 0
    quarantined = await server.version(ready)
    assert quarantined.state == "quarantined"
    assert [entry for entry in await actions(database, tenant_id) if entry[0] == "version.quarantine"] == [
        ("version.quarantine", "validation")
    ] * 2


async def test_what_an_engine_refuses_is_quarantined_for_its_tenant_alone(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    async with database.as_operator() as session:
        other = (await TenantRepository(session).create("bolt")).id
        await AdapterRepository(session, other).get_or_create("voice")
    mine, theirs = await server.begin(tenant_id), await server.begin(other)
    digest = (await server.version(mine)).digest
    assert digest is not None and digest == (await server.version(theirs)).digest
    server.refused = [(namespace_of(tenant_id), digest), (b"?" * 32, digest), (b"?" * 32, "e" * 64)]
    await server.life_cycle.follow_quarantines()
    assert (await server.version(mine)).state == "quarantined"
    assert (await server.version(theirs)).state == "ready"


async def test_reports_are_json_whatever_the_engine_found(server: Server, tenant_id: UUID) -> None:
    probe = ProbeReport(digest="", max_error={"q_proj": float("inf")}, code="non_finite_logits", finite=False)
    server.engine.script = FakeScript(probe=probe)
    rejected = await server.version(await server.begin(tenant_id))
    assert "inf" in json.dumps(rejected.report, allow_nan=False)
