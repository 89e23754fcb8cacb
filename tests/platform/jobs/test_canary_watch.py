"""A canary that breaks a bound goes back: once, whoever watches, in one transaction with audit entry, event and policy epoch."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select, text
from tests.tenants.ledger.stored_usage import Used, UsingTenant, settle
from tests.tenants.registry_records import RegistryWriter, add, make_tenant, unit

from loraplex.platform.jobs.canary_watch import CanaryWatch
from loraplex.tenants.canaries import guards
from loraplex.tenants.canaries.records import GuardBounds, GuardDocument
from loraplex.tenants.database import Database
from loraplex.tenants.models import AuditEntry, OutboxEvent
from loraplex.tenants.registry import use_cases
from loraplex.tenants.registry.aliases import AliasRepository
from loraplex.tenants.registry.records import AliasDocument

FAILURES = GuardBounds(max_failure_ratio=2.0, min_requests=20)


class Publisher:
    def __init__(self) -> None:
        self.notified: list[UUID] = []

    async def publish(self, tenant_id: UUID) -> None:
        self.notified.append(tenant_id)


@pytest.fixture(autouse=True)
def counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "SETTLED", timedelta(0))


class Release:
    """The adapter `support`, whose alias `production` moves from version 1 to a split of 90 and 10 with version 2."""

    def __init__(self, database: Database, tenant: UsingTenant) -> None:
        self.database = database
        self.tenant = tenant
        self.publisher = Publisher()
        self.watch = CanaryWatch(database=database, publisher=self.publisher)

    async def move(self, targets: dict[int, int], guard: GuardBounds | None = None) -> AliasDocument:
        async with self.database.as_tenant(self.tenant.id) as session:
            uow = unit(session, self.tenant.id)
            return await use_cases.move(uow, self.tenant.id, "support", "production", targets, guard=guard)

    def used(self, version: int, count: int = 1, **more: Any) -> None:
        """Requests that come one by one."""
        base = datetime.now(UTC)
        key = next(iter(self.tenant.keys.values()))
        values = {"alias": "production", **more}
        rows = [
            Used(
                *(self.tenant.adapters["support"], key, base + timedelta(microseconds=number)),
                adapter_version=version,
                **values,
            )
            for number in range(count)
        ]
        settle(self.database.url, self.tenant, rows)

    async def alias(self) -> AliasDocument:
        async with self.database.as_tenant(self.tenant.id) as session:
            return await AliasRepository(session, self.tenant.id).get("support", "production")

    async def guard(self) -> GuardDocument:
        found = (await self.alias()).guard
        assert found is not None
        return found


@pytest.fixture
async def release(database: Database) -> Release:
    tenant_id = await make_tenant(database)
    async with database.as_tenant(tenant_id) as session:
        for number in (1, 2, 3):
            await add(RegistryWriter(session, tenant_id), number)
        adapter = await RegistryWriter(session, tenant_id).get("support")
    made = Release(database, UsingTenant(tenant_id, "acme", {"support": adapter.id}, {"k": uuid4()}))
    await made.move({1: 100})
    return made


async def epoch(release: Release) -> int:
    async with release.database.as_operator() as session:
        query = text("SELECT policy_epoch FROM tenants WHERE id = :id")
        return int(await session.scalar(query, {"id": release.tenant.id}) or 0)


async def test_a_canary_that_fails_goes_back_once(release: Release) -> None:
    await release.move({1: 90, 2: 10}, FAILURES)
    assert (await release.guard()).baseline == 1
    release.used(1, 170)
    release.used(1, 10, outcome="failed")
    release.used(2, 8)
    release.used(2, 11, outcome="failed")
    await release.watch.look()
    guard = await release.guard()
    assert guard.counts.canary_failed == 11 and guard.evidence["max_failure_ratio"] > 1
    assert guard.broken is None, "it has fewer requests than `min_requests`"
    before = await epoch(release)
    release.used(2)
    second = CanaryWatch(database=release.database, publisher=release.publisher)
    await asyncio.gather(release.watch.look(), second.look())
    await second.look()
    back = await release.alias()
    assert (back.targets, back.previous_targets, back.guard) == ({1: 100}, {1: 100}, None)
    assert await epoch(release) == before + 1 and release.publisher.notified == [release.tenant.id]
    async with release.database.as_operator() as session:
        (entry,) = await session.scalars(select(AuditEntry).where(AuditEntry.action == "alias.revert"))
        (event,) = await session.scalars(select(OutboxEvent).where(OutboxEvent.type == "alias.reverted"))
    assert (entry.actor_kind, entry.actor, entry.tenant_id) == ("system", "canary watch", release.tenant.id)
    assert entry.before == {"targets": {"1": 90, "2": 10}} and entry.after is not None
    assert (entry.after["targets"], entry.after["reason"]) == ({"1": 100}, "max_failure_ratio")
    assert (entry.after["canary_failed"], entry.after["baseline_requests"]) == (11, 180)
    assert (event.data["adapter"], event.data["alias"]) == ("support", "production")
    assert (event.data["baseline"], event.data["canary"]) == (1, 2)
    assert event.data["counts"] == guard.counts.model_dump() | {"canary_requests": 20, "canary_answered": 9}


async def test_what_is_no_request_of_the_split_does_not_count(release: Release) -> None:
    release.used(2, 5, outcome="failed")
    await asyncio.sleep(0.01)
    await release.move({1: 90, 2: 10}, FAILURES)
    release.used(2, 30, outcome="failed", alias=None)
    release.used(2, 30, outcome="failed", alias="fresh")
    release.used(3, 30, outcome="failed")
    release.used(2, 30, outcome="aborted")
    release.used(2, 30, outcome="revoked")
    release.used(2, 3)
    for _ in range(2):
        await release.watch.look()
    counts = (await release.guard()).counts
    assert (counts.canary_requests, counts.canary_answered, counts.baseline_requests) == (3, 3, 0)


@pytest.mark.parametrize("outcome", ["completed", "failed"])
async def test_answers_that_miss_their_schema(release: Release, outcome: str) -> None:
    await release.move({1: 90, 2: 10}, GuardBounds(max_unsatisfied=0.05, min_requests=20))
    release.used(1, 40, unsatisfied=True)
    release.used(2, 40)
    await release.watch.look()
    assert (await release.alias()).version is None, "only those of the canary count"
    # A stream of several choices ends with the first that misses it.
    release.used(2, 12, unsatisfied=True, outcome=outcome)
    await release.watch.look()
    assert (await release.alias()).version == 1


async def test_the_time_to_the_first_token_is_compared_in_pairs(release: Release) -> None:
    await release.move({1: 90, 2: 10}, GuardBounds(max_ttft_ratio=1.5, min_requests=20))
    for slower in (True, False, True):
        release.used(1, ttft_ms=100)
        release.used(2, ttft_ms=151 if slower else 150)
        release.used(2, ttft_ms=1000)
    release.used(1)
    release.used(2, ttft_ms=1000)
    await release.watch.look()
    counts = (await release.guard()).counts
    assert (counts.ttft_pairs, counts.ttft_slower) == (3, 2)
    for _ in range(20):
        release.used(1, ttft_ms=100)
        release.used(2, ttft_ms=200)
    await release.watch.look()
    assert (await release.alias()).version == 1


async def test_a_guard_ends_with_its_split(release: Release) -> None:
    await release.move({1: 90, 2: 10}, FAILURES)
    await release.move({1: 50, 2: 50})
    assert (await release.alias()).guard is None
    release.used(2, 100, outcome="failed")
    await release.watch.look()
    assert (await release.alias()).version is None
    changed = await release.move({1: 50, 2: 50}, GuardBounds(max_unsatisfied=0.1, baseline=2))
    assert changed.previous_targets == {1: 90, 2: 10}, "a rollback leads to other targets"
    assert (await release.move({1: 50, 2: 50}, GuardBounds(max_unsatisfied=0.1))).revision == changed.revision
    assert changed.guard is not None and (changed.guard.baseline, changed.guard.canary) == (2, 1)


async def test_a_baseline_that_is_not_served_is_not_gone_back_to(release: Release) -> None:
    await release.move({1: 90, 2: 10}, FAILURES)
    release.used(2, 100, outcome="failed")
    for state, version in (("quarantined", None), ("ready", 1)):
        async with release.database.as_operator() as session:
            change = text("UPDATE adapter_versions SET state = :state WHERE version = 1")
            await session.execute(change, {"state": state})
        await release.watch.look()
        assert (await release.alias()).version == version


async def test_a_guard_that_fails_does_not_stop_the_others(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    await release.move({1: 90, 2: 10}, FAILURES)
    release.used(2, 100, outcome="failed")
    due = guards.GuardRepository.due
    broken = guards.GuardedAlias(release.tenant.id, "no id", "production", 1)  # type: ignore[arg-type]

    async def one_more(self: guards.GuardRepository) -> list[guards.GuardedAlias]:
        return [broken, *await due(self)]

    monkeypatch.setattr(guards.GuardRepository, "due", one_more)
    await release.watch.look()
    assert (await release.alias()).version == 1


async def test_a_backlog_is_counted_in_steps(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    await release.move({1: 90, 2: 10}, FAILURES)
    release.used(2, 5)
    monkeypatch.setattr(guards, "LONGEST", timedelta(microseconds=1))
    await release.watch.look()
    assert (await release.guard()).counts.canary_requests == 0
    monkeypatch.setattr(guards, "LONGEST", timedelta(hours=1))
    await release.watch.look()
    assert (await release.guard()).counts.canary_requests == 5
