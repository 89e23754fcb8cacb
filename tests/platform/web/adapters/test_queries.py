"""The list of adapters and one adapter: what is served where, observed shares, reports, and configurations compared."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from tests.tenants.ledger.stored_usage import Used, settle
from tests.tenants.ledger.stored_usage import make_tenant as make_using_tenant
from tests.tenants.registry_records import AliasWriter, RegistryWriter, digest, make_tenant

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.engine.messages import EngineStats
from loraplex.platform.web.adapters import adapter_queries as adapter
from loraplex.platform.web.adapters import queries as adapters
from loraplex.platform.web.adapters.residency import Residency, residency
from loraplex.platform.web.adapters.validation_report import CHECKS, REMEDIATIONS, report_of
from loraplex.platform.web.cursors import Cursors, Page
from loraplex.tenants.actors import Actor
from loraplex.tenants.audit_log import AuditRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import AdapterNotFound, VersionNotFound
from loraplex.tenants.registry import queries
from loraplex.tenants.registry.records import ReportDocument
from loraplex.tenants.registry.versions import VersionStates

DEVICE = Residency(device=frozenset({digest(1)}), host=frozenset({digest(1), digest(2)}))


def part(after: str | None = None) -> Page[adapters.ListedAdapter, str]:
    """The first part of the list, or the one after an adapter."""
    return Page(50, after, {}, Cursors(b"", b""), adapters.BY_NAME)


async def add_versions(
    database: Database, tenant_id: UUID, name: str, *states: str, split: dict[int, int] | None = None
) -> None:
    async with database.as_tenant(tenant_id) as session:
        registry = RegistryWriter(session, tenant_id)
        await registry.get_or_create(name)
        for number, state in enumerate(states, 1):
            config = {"r": 8, "target_modules": ["q_proj"][:number]}
            await registry.add_version(
                name, digest=digest(number), size_bytes=10, rank=8, config=config, report={}, state=state
            )
        if split is not None:
            await AliasWriter(session, tenant_id).set(name, "production", split)


async def test_adapters_are_listed_with_production_and_newest_version(database: Database) -> None:
    tenant_id, other = await make_tenant(database), await make_tenant(database, "other")
    await add_versions(database, other, "foreign", "ready")
    await add_versions(database, tenant_id, "coral", "ready", "ready", "quarantined", split={1: 90, 2: 10})
    await add_versions(database, tenant_id, "pirate", "ready", split={1: 100})
    await add_versions(database, tenant_id, "empty")
    async with database.as_tenant(tenant_id) as session:
        listed = await adapters.listed_adapters(session, tenant_id, DEVICE, part())
        coral, empty, pirate = [each.summary for each in listed]
        assert pirate.name == "pirate"
        assert (coral.name, coral.production, coral.version, coral.state) == (
            *("coral", {1: 90, 2: 10}),
            *(3, "quarantined"),
        )
        assert (coral.versions, coral.size_bytes, empty.size_bytes) == (3, 30, 0)
        assert [each.tier for each in listed] == ["host", None, "device"]
        assert (empty.production, empty.version) == ({}, None)
        found = await adapters.listed_adapters(session, tenant_id, DEVICE, part(), search="ira")
        assert [each.summary.name for each in found] == ["pirate"]
        found = await adapters.listed_adapters(
            session, tenant_id, DEVICE, part(), state="quarantined", search="\0"
        )
        assert [each.summary.name for each in found] == ["coral"]
        rest = await adapters.listed_adapters(session, tenant_id, DEVICE, part("coral"))
        assert [each.summary.name for each in rest] == ["empty", "pirate"]
        used = await adapters.space(session, tenant_id)
        assert (used.adapters, used.used_bytes) == (3, 40) and used.max_bytes > 40


async def test_an_adapter_shows_what_its_targets_answered(database: Database) -> None:
    tenant = make_using_tenant(database.url)
    coral, key = tenant.adapters["coral"], next(iter(tenant.keys.values()))
    await add_versions(database, tenant.id, "coral", "ready", "ready", split={1: 75, 2: 25})
    now = datetime.now(UTC)
    used = [Used(coral, key, now, adapter_version=1, alias="production") for _ in range(2)]
    used += [Used(coral, key, now, adapter_version=2, outcome="failed", alias="production")]
    # One that names its version, and one from before the split.
    used += [Used(coral, key, now, adapter_version=2)]
    used += [Used(coral, key, now - timedelta(hours=2), adapter_version=2, alias="production")]
    used += [Used(coral, key, now - timedelta(hours=30), adapter_version=2)]
    settle(database.url, tenant, used)
    async with database.as_tenant(tenant.id) as session:
        found = await adapter.adapter(session, tenant.id, "coral", DEVICE)
        (production,) = found.aliases
        assert [(each.version, each.weight, each.observed_permille) for each in production.targets] == [
            (1, 75, 667),
            (2, 25, 333),
        ]
        second = production.targets[1].use
        assert second is not None and (second.requests, second.failed, second.completion_tokens) == (1, 1, 6)
        assert [(each.record.version, each.tier, each.aliases) for each in found.versions] == [
            (2, "host", ["production 25 %"]),
            (1, "device", ["production 75 %"]),
        ]
        assert found.requests_24h == 5 and not found.is_sample and production.record.previous is None
        with pytest.raises(VersionNotFound):
            await adapter.version(session, tenant.id, "coral", 3)
    other = await make_tenant(database, "other")
    async with database.as_tenant(other) as session:
        with pytest.raises(AdapterNotFound):
            await adapter.adapter(session, other, "coral")
        assert await queries.names(session, other) == []


async def test_a_quarantined_version_says_why(database: Database) -> None:
    tenant_id = await make_tenant(database)
    await add_versions(database, tenant_id, "coral", "ready")
    async with database.as_tenant(tenant_id) as session:
        audit = AuditRepository(session, Actor("system", "validation"), tenant_id)
        record = await RegistryWriter(session, tenant_id).version("coral", 1)
        assert (await adapter.version(session, tenant_id, "coral", 1)).quarantined_at is None
        await VersionStates(session, tenant_id, audit).move(record.id, "quarantined", reason="its rows")
        found = await adapter.version(session, tenant_id, "coral", 1)
        assert found.quarantine_reason == "its rows" and found.quarantined_at is not None


async def test_residency_is_that_of_the_tenants_own_files() -> None:
    own, foreign = b"a" * 32, b"b" * 32
    stats = EngineStats(
        device_adapters=[(own, digest(1)), (foreign, digest(3))],
        host_adapters=[(own, digest(1)), (own, digest(2))],
    )
    found = await residency(FakeEngine(FakeScript(stats=stats)), own)
    assert [found.tier([digest(number)]) for number in (1, 2, 3)] == ["device", "host", "disk"]
    assert found.tier([digest(1), digest(2)]) == "host" and found.tier([]) is None


async def test_residency_is_unknown_while_no_engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(self: FakeEngine) -> EngineStats:
        raise EngineUnavailable("away")

    monkeypatch.setattr(FakeEngine, "stats", away)
    found = await residency(FakeEngine(), b"a" * 32)
    assert not found.is_known and found.tier([digest(1)]) is None


def check(name: str, passed: bool = True, **more: Any) -> dict[str, Any]:
    return {"name": name, "passed": passed, "detail": f"about {name}", **more}


def test_a_report_has_the_checks_in_their_order_and_says_how_to_mend_the_failed_one() -> None:
    stored = {
        "checks": [check("files"), check("manifest"), check("effect", warning=True), check("probe", False)]
    }
    report = report_of(ReportDocument.model_validate(stored), "rejected")
    assert [(row.name, row.state) for row in report.checks] == [
        ("files", "passed"),
        ("manifest", "passed"),
        ("effect", "warning"),
        ("probe", "failed"),
    ]
    assert (report.passed, report.warnings, report.is_running) == (3, 1, False)
    assert report.failed is not None and report.failed.remediation == REMEDIATIONS["probe"]
    assert set(CHECKS) <= set(REMEDIATIONS)
    unknown = report_of(ReportDocument.model_validate({"checks": [check("of_tomorrow", False)]}), "rejected")
    assert unknown.failed is not None and unknown.failed.remediation


def test_a_report_of_a_version_that_is_being_validated_has_open_checks() -> None:
    report = report_of(ReportDocument(), "validating")
    assert [row.name for row in report.checks] == list(CHECKS) and report.is_running
    assert {row.state for row in report.checks} == {"open"} and report_of(
        ReportDocument(), "ready"
    ).checks == []


def test_a_check_with_a_warning_counts_once() -> None:
    stored = {"checks": [check("base_copies"), check("base_copies", warning=True)]}
    (row,) = report_of(ReportDocument.model_validate(stored), "ready").checks
    assert row.state == "warning"


def test_a_changed_field_is_one_line_removed_and_one_added() -> None:
    before = {"r": 8, "lora_alpha": 16.0, "target_modules": ["q_proj", "v_proj"]}
    lines = adapter.config_diff(before, {**before, "lora_alpha": 24.0})
    assert [(line.kind, line.text) for line in lines] == [
        ("same", "{"),
        ("removed", '  "lora_alpha": 16.0,'),
        ("added", '  "lora_alpha": 24.0,'),
        ("same", '  "r": 8,'),
        ("same", '  "target_modules": ["q_proj", "v_proj"]'),
        ("same", "}"),
    ]
    assert adapter.config_diff(before, dict(before)) == []
    assert {line.kind for line in adapter.config_diff(None, before)} == {"added"}
