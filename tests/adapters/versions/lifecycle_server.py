"""A server's version lifecycle: real database and storage, a scripted engine, instant validation."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select
from tests.adapters.validation.good_folder import CONFIG, WEIGHTS, write_good
from tests.tenants.registry_records import RegistryWriter

from loraplex.adapters.errors import BlobMissing, ValidationUnavailable
from loraplex.adapters.report import Check, ValidationReport
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.adapters.validation.result import Validated, ValidationResult
from loraplex.adapters.versions.lifecycle import VersionLifecycle
from loraplex.adapters.versions.pending_folders import PENDING_FOLDER, PendingFolders
from loraplex.adapters.versions.version_job import LifecycleConfig, VersionJob
from loraplex.engine.fake_engine import FakeEngine
from loraplex.engine.messages import ProbeReport
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.actors import Actor
from loraplex.tenants.database import Database
from loraplex.tenants.models import AdapterVersion, AuditEntry
from loraplex.tenants.unit_of_work import unit_of_work

BASE_DIGEST = "b" * 64
ACTOR = Actor("key", "abc123")
QUICK = LifecycleConfig(retry_s=0.01, max_retry_s=0.05, max_waiting_per_tenant=2, max_waiting=3)
BAD_PROBE = ProbeReport(
    digest="", max_error={"q_proj": 0.5}, bound=0.01, code="adapter_inexact", message="q_proj differs"
)


def namespace_of(tenant_id: UUID) -> bytes:
    return hashlib.sha256(tenant_id.bytes).digest()


class LocalStore(BlobStore):
    """The local folder, which may be out of order."""

    def __init__(self, storage: LocalAdapterStore) -> None:
        self.storage = storage
        self.failures = 0

    async def store(self, tenant_id: UUID, digest: str, staged: Path) -> Path:
        if self.failures:
            self.failures -= 1
            raise BlobMissing("the disk is full")
        return self.storage.put(tenant_id, digest, staged)

    async def ensure_stored(self, tenant_id: UUID, digest: str) -> None:
        self.storage.path(tenant_id, digest)


class Instant:
    """Validates at once, or when `gate` opens."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = 0
        self.folders: list[Path] = []

    async def validate(self, tenant_id: UUID, folder: Path) -> ValidationResult:
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
        self,
        database: Database,
        root: Path,
        validation: Any,
        limits: LifecycleConfig = QUICK,
        store: BlobStore | None = None,
    ) -> None:
        self.root = root
        self.database = database
        self.storage = LocalAdapterStore(root)
        self.store = LocalStore(self.storage)
        self.engine = FakeEngine()
        self.validation = validation
        work = VersionJob(database, validation, self.engine, store or self.store, namespace_of, limits)
        self.refused: list[tuple[bytes, str]] = []
        self.lifecycle = VersionLifecycle(database, work, PendingFolders(root), limits, lambda: self.refused)

    def staged(self, spoil: Callable[[Path], object] | None = None) -> Path:
        with self.storage.staging() as folder:
            pass
        write_good(folder)
        if spoil is not None:
            spoil(folder)
        return folder

    async def begin(self, tenant_id: UUID, spoil: Callable[[Path], object] | None = None) -> AdapterVersion:
        return await begin(self.database, self.lifecycle, tenant_id, "voice", self.staged(spoil))

    async def sweep(self) -> None:
        """Take over what ended processes have left, as rounds of the life cycle do."""
        await self.lifecycle.resume_abandoned()
        await self.lifecycle.end_stale()

    async def version(self, record: AdapterVersion) -> AdapterVersion:
        await asyncio.wait_for(self.lifecycle.settled(), 60)
        return await version_of(self.database, record)

    def pending_files(self) -> list[str]:
        folder = self.root / PENDING_FOLDER
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


async def begin(
    database: Database, lifecycle: VersionLifecycle, tenant_id: UUID, name: str, staged: Path
) -> AdapterVersion:
    """Register a version and validate it in the background, as an upload does."""
    async with unit_of_work(database, ACTOR, tenant_id, None) as uow:
        registered = await lifecycle.register(uow, tenant_id, name, staged)
    lifecycle.start(registered)
    return registered.record


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
        await RegistryWriter(session, owner.id).get_or_create("voice")
        return owner.id


@pytest.fixture
async def server(database: Database, tmp_path: Path) -> AsyncIterator[Server]:
    """With validation that takes no time."""
    made = Server(database, tmp_path / "adapters", Instant())
    yield made
    await made.lifecycle.close()
