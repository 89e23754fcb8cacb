"""From an uploaded folder to a ready or rejected version: real database and processes, a scripted engine."""

import asyncio
import json
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import text
from tests.adapters.validation.good_folder import CONFIG, LIMITS, MODEL, WEIGHTS
from tests.adapters.validation.spoiled_folders import config
from tests.adapters.versions.lifecycle_server import (
    BAD_PROBE,
    BASE_DIGEST,
    Instant,
    Server,
    actions,
    begin,
    namespace_of,
    server,
    tenant_id,
)
from tests.tenants.registry_records import RegistryWriter

from loraplex.adapters.errors import ValidationShareExceeded, ValidationUnavailable
from loraplex.adapters.target_modules import BaseModel, adaptable_modules
from loraplex.adapters.versions.version_job import LifecycleConfig
from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import FakeScript
from loraplex.engine.messages import AdapterRef, ProbeReport
from loraplex.platform.server.adapter_validation import AdapterValidation
from loraplex.platform.workers.pool import WorkerPool
from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import AdapterNotFound

__all__ = ["server", "tenant_id"]


async def test_an_upload_is_validated_probed_stored_and_ready(
    database: Database, tenant_id: UUID, tmp_path: Path
) -> None:
    """By a real process."""
    pool = WorkerPool()
    validation = AdapterValidation(pool, BaseModel(adaptable_modules(MODEL), BASE_DIGEST), LIMITS)
    server = Server(database, tmp_path / "adapters", validation)
    begun = await server.begin(tenant_id)
    assert (begun.state, begun.version, begun.digest, begun.created_by) == ("validating", 1, None, "abc123")
    bad = await server.begin(tenant_id, config(use_dora=True))
    ready, rejected = await server.version(begun), await server.version(bad)

    assert ready.state == "ready" and ready.rank == 4 and ready.digest is not None
    server.storage.verify(tenant_id, ready.digest, BASE_DIGEST)
    names = [check["name"] for check in ready.report["checks"]]
    assert names[:3] == ["files", "manifest", "header"] and names[-1] == "probe"
    assert ready.report["system_fingerprint"] == server.engine.info().system_fingerprint
    (probed,) = server.engine.probed
    assert (probed.namespace, probed.digest) == (namespace_of(tenant_id), ready.digest)

    assert (rejected.state, rejected.version, rejected.digest) == ("rejected", 2, None)
    failed = rejected.report["checks"][-1]
    assert (failed["name"], failed["passed"]) == ("manifest", False) and "DoRA" in failed["detail"]
    assert server.pending_files() == []
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


async def test_a_failing_probe_rejects_with_the_figures(server: Server, tenant_id: UUID) -> None:
    server.engine.script = FakeScript(probe=BAD_PROBE)
    rejected = await server.version(await server.begin(tenant_id))
    assert rejected.state == "rejected"
    failed = rejected.report["checks"][-1]
    assert failed["name"] == "probe" and not failed["passed"]
    assert "q_proj differs" in failed["detail"] and "q_proj 0.5; allowed: 0.01" in failed["detail"]
    assert not list(server.root.glob("*/*/*")), "nothing was stored"


async def test_an_adapter_without_effect_is_warned_about(server: Server, tenant_id: UUID) -> None:
    server.engine.script = FakeScript(probe=ProbeReport(digest="", modules=2, max_error={"q_proj": 0.0}))
    ready = await server.version(await server.begin(tenant_id))
    assert ready.state == "ready" and ready.report["checks"][-1]["warning"]


async def test_server_side_failures_are_retried(server: Server, tenant_id: UUID) -> None:
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
    await asyncio.wait_for(server.lifecycle.settled(), 60)
    assert server.pending_files() == []


async def test_a_version_is_rejected_after_give_up_s(
    database: Database, tenant_id: UUID, tmp_path: Path
) -> None:
    limits = LifecycleConfig(retry_s=0.01, give_up_s=0.2)
    server = Server(database, tmp_path / "adapters", Instant(), limits)
    server.validation.failures = 10**6
    rejected = await server.version(await server.begin(tenant_id))
    assert rejected.state == "rejected"
    assert "could not be validated in time" in rejected.report["checks"][-1]["detail"]
    assert server.pending_files() == []


async def test_the_number_of_waiting_versions_is_bounded(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    server.validation.gate.clear()
    for _ in range(2):
        await server.begin(tenant_id)
    with pytest.raises(ValidationShareExceeded, match="2 versions of this tenant"):
        await server.begin(tenant_id)
    async with database.as_operator() as session:
        others = [(await TenantRepository(session).create(name)).id for name in ("bolt", "cask")]
        for other in others:
            await RegistryWriter(session, other).get_or_create("voice")
    await server.begin(others[0])
    with pytest.raises(ValidationUnavailable, match="3 versions wait"):
        await server.begin(others[1])
    server.validation.gate.set()
    await server.lifecycle.settled()
    await server.version(await server.begin(others[1]))


async def test_an_adapter_that_does_not_exist_leaves_nothing(server: Server, tenant_id: UUID) -> None:
    staged = server.staged()
    with pytest.raises(AdapterNotFound):
        await begin(server.database, server.lifecycle, tenant_id, "nobody", staged)
    assert not staged.exists() and server.pending_files() == []


async def test_a_version_deleted_meanwhile_is_ignored(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    server.validation.gate.clear()
    begun = await server.begin(tenant_id)
    async with database.as_tenant(tenant_id) as session:
        await session.execute(text("UPDATE adapter_versions SET state = 'deleting'"))
    server.validation.gate.set()
    assert (await server.version(begun)).state == "deleting"
    assert server.pending_files() == []


async def test_reports_are_json_whatever_the_engine_found(server: Server, tenant_id: UUID) -> None:
    probe = ProbeReport(digest="", max_error={"q_proj": float("inf")}, code="non_finite_logits", finite=False)
    server.engine.script = FakeScript(probe=probe)
    rejected = await server.version(await server.begin(tenant_id))
    assert "inf" in json.dumps(rejected.report, allow_nan=False)
