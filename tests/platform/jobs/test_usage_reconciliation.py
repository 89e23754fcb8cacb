"""The job compares the newest hours in each round and everything in turn; a planted drift is a metric until it is gone."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
import structlog
from prometheus_client import CollectorRegistry
from tests.tenants.ledger.stored_usage import Used, UsingTenant, make_tenant, settle

from loraplex.platform.jobs import usage_reconciliation
from loraplex.platform.jobs.usage_reconciliation import UsageReconciliation
from loraplex.platform.observability.billing_metrics import COMPARED, BillingMetrics
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.drift import ALONE

NOW = datetime.now(UTC).replace(day=3, hour=5)


@dataclass
class World:
    job: UsageReconciliation
    registry: CollectorRegistry
    tenant: UsingTenant
    url: str

    def plant(self, table: str, change: str, where: str = "true") -> None:
        with psycopg.connect(self.url) as connection:
            connection.execute(f"UPDATE {table} SET {change} WHERE {where}".encode())

    def drift(self, compared: str, family: str = "drift_pico") -> float | None:
        return self.registry.get_sample_value(f"loraplex_billing_{family}", {"compared": compared})


@pytest.fixture
def world(database: Database, monkeypatch: pytest.MonkeyPatch) -> World:
    """A tenant with a request now and one two days ago. A round compares everything, however slow the machine is."""
    monkeypatch.setattr(usage_reconciliation, "ROUND_S", 60.0)
    registry = CollectorRegistry()
    tenant = make_tenant(database.url)
    key = next(iter(tenant.keys.values()))
    at = [Used(None, key, time, amount_pico=1_000_000) for time in (NOW, NOW - timedelta(days=2))]
    settle(database.url, tenant, at)
    job = UsageReconciliation(database=database, recorder=BillingMetrics(registry), now=lambda: NOW)
    return World(job, registry, tenant, database.url)


async def test_without_a_difference_every_drift_is_zero(world: World) -> None:
    await world.job.round()
    assert [world.drift(each) for each in COMPARED] == [0.0] * len(COMPARED)


async def test_a_drift_is_exported_and_named_until_it_is_gone(world: World) -> None:
    with structlog.testing.capture_logs() as logs:
        world.plant("usage_rollups", "amount_pico = amount_pico + 7")
        world.plant("usage_totals", "tokens = tokens + 1", "level = 'key'")
        await world.job.round()
        assert (world.drift("rollups"), world.drift("rollups", "differences")) == (14.0, 2.0)
        # Two days; the month has as much more as they have together.
        assert (world.drift("totals"), world.drift("totals", "differences")) == (0.0, 3.0)
        named = str([each["named"] for each in logs if "named" in each])
        assert str(world.tenant.id) in named and "amount_pico +7" in named
        logged = len(logs)
        await world.job.round()
        assert len(logs) == logged, "a known difference is logged once"
        world.plant("usage_rollups", "amount_pico = amount_pico - 7")
        world.plant("usage_totals", "tokens = tokens - 1", "level = 'key'")
        await world.job.round()
        assert [world.drift(each) for each in COMPARED] == [0.0] * len(COMPARED)
        assert world.drift("totals", "differences") == 0.0


async def test_a_round_ends_in_time_and_the_next_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_reconciliation, "ROUND_S", -1.0)
    world.plant("usage_rollups", "amount_pico = 0", f"hour < '{NOW - timedelta(days=1)}'")
    await world.job.round()
    assert world.drift("rollups") == 0.0, "the older hour waits for its turn"
    world.plant("usage_rollups", "amount_pico = 0", f"hour >= '{NOW - timedelta(hours=1)}'")
    await world.job.round()
    assert world.drift("rollups") == 1_000_000.0, "the newest hour is compared in every round"
    monkeypatch.setattr(usage_reconciliation, "ROUND_S", 60.0)
    await world.job.round()
    assert world.drift("rollups") == 2_000_000.0


async def test_one_gateway_compares_at_a_time(world: World, database: Database) -> None:
    world.plant("usage_rollups", "amount_pico = 0")
    async with database.as_operator() as session:
        assert await session.scalar(ALONE)
        await world.job.round()
        assert world.drift("rollups") == 0.0
    await world.job.round()
    assert world.drift("rollups") == 2_000_000.0


async def test_no_failure_ends_the_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    failures: list[Exception] = [RuntimeError("a defect")]

    async def fail(self: Any) -> None:
        raise failures[0]

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 2:
            raise StopIteration

    monkeypatch.setattr(UsageReconciliation, "round", fail)
    monkeypatch.setattr(asyncio, "sleep", rest)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await world.job.run()
    assert min(rests) >= usage_reconciliation.INTERVAL_S


def test_the_counters_report_their_own_drift() -> None:
    registry = CollectorRegistry()
    BillingMetrics(registry).watch_counters(lambda: (5, 6))
    for family, value in (("drift_pico", 11.0), ("differences", 2.0)):
        sample = registry.get_sample_value(f"loraplex_billing_{family}", {"compared": "counters"})
        assert sample == value
