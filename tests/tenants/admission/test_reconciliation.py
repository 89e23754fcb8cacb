"""Living counters that lost writes are noticed and rebuilt; correct ones never are, however busy."""

import asyncio
import math
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg
import pytest
from redis.asyncio import Redis
from tests.tenants.admission.gateways import (
    SETTINGS,
    TenantWithGateways,
    check_ledger,
    closed,
    make_tenant_with_gateways,
    open_client,
    plain,
    usage,
    used,
)

from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.counters.counter_replies import Settled
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, QuotaUnavailable, RateLimited, ValkeyUnavailable
from loraplex.tenants.valkey import tenant_key

WORKERS, ATTEMPTS, ROUNDS = 8, 25, 10


async def spend(tenant: TenantWithGateways, gateway: QuotaAdmissionController) -> None:
    reservation = await gateway.admit(tenant.request())
    await gateway.settle(reservation, usage(reservation))


async def lose(client: Redis, tenant: TenantWithGateways, field: str, amount: int) -> None:
    """Lose the last writes of the tenant's day and month; a negative amount adds use that was never settled."""
    pattern = f"{tenant_key(tenant.tenant_id)}:*:use:tenant:*"
    async for key in client.scan_iter(pattern, count=1000):
        await client.hincrby(key, field, -amount)


async def reconcile(gateway: QuotaAdmissionController, rounds: int = 2) -> int:
    """Counters that lost writes are compared with what was shipped."""
    for _ in range(rounds):
        await gateway.maintenance.reconciliation.reconcile()
    return gateway.reconciliation.rebuilt


@pytest.mark.parametrize(("field", "amount"), [("tokens", 15), ("amount", 7), ("tokens", -100)])
async def test_lost_writes_are_noticed_and_rebuilt(
    database: Database, valkey_url: str, field: str, amount: int
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as gateway, open_client(valkey_url) as client:
        for _ in range(3):
            await spend(tenant, gateway)
        await lose(client, tenant, field, amount)
        assert await reconcile(gateway, 1) == 0
        assert [each.corrected_at for each in gateway.reconciliation.log.findings] == [None]
        assert await reconcile(gateway, 1) == 1
        assert [each.corrected_at is None for each in gateway.reconciliation.log.findings] == [False]
        assert await check_ledger(tenant, gateway) == (45, 3)
        await spend(tenant, gateway)
        assert await reconcile(gateway, 3) == 1


async def test_counters_that_lost_writes_start_with_empty_buckets(
    database: Database, valkey_url: str
) -> None:
    """The buckets may have lost as much."""
    tenant = await make_tenant_with_gateways(database, valkey_url, requests_per_minute=60)
    async with tenant.gateway() as gateway, open_client(valkey_url) as client:
        await spend(tenant, gateway)
        await lose(client, tenant, "tokens", 1)
        assert await reconcile(gateway) == 1
        assert (await used(gateway, tenant.tenant_id))["requests_per_minute"].used >= 55
        with pytest.raises(RateLimited):
            for _ in range(10):
                await gateway.admit(tenant.request())


async def test_one_of_two_gateways_rebuilds(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as first, tenant.gateway() as second, open_client(valkey_url) as client:
        for gateway in (first, second):
            await spend(tenant, gateway)
        await lose(client, tenant, "tokens", 15)
        for _ in range(3):
            await asyncio.gather(*(reconcile(gateway, 1) for gateway in (first, second)))
        assert first.reconciliation.rebuilt + second.reconciliation.rebuilt == 1
        assert await check_ledger(tenant, first) == (30, 2)


async def test_usage_on_its_way_is_no_difference(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the ledger, but its gateway has not updated the counters: neither gateway finds a drift."""
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as slow, tenant.gateway() as other:
        await spend(tenant, other)
        reservation = await slow.admit(tenant.request())
        counters, settle = slow.maintenance.counters, slow.maintenance.counters.settle

        async def fail(*_: object, **__: object) -> Settled:
            raise ValkeyUnavailable("away")

        settle_early = counters.settle_early
        monkeypatch.setattr(counters, "settle", fail)
        monkeypatch.setattr(counters, "settle_early", fail)
        await slow.settle(reservation, usage(reservation))
        await tenant.shipped()
        monkeypatch.setattr(counters, "settle", settle)
        monkeypatch.setattr(counters, "settle_early", settle_early)
        other.maintenance.requests.active[tenant.tenant_id] = None
        assert (await reconcile(slow, 3), await reconcile(other, 3)) == (0, 0)
        assert not other.maintenance.requests.active
        await slow.maintenance.settlements.retry()
        assert await check_ledger(tenant, slow) == (30, 2)


async def test_usage_that_is_not_shipped_is_no_drift(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters have it and the ledger has not: its gateway is waited for, unless it is silent."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as slow, tenant.gateway(replace(SETTINGS, fence_s=0.5)) as other:
        await spend(tenant, other)
        settle = slow.maintenance.ledger.settle

        async def fail(*_: Any) -> Any:
            raise DatabaseUnavailable("away")

        monkeypatch.setattr(slow.maintenance.ledger, "settle", fail)
        await spend(tenant, slow)
        with pytest.raises(QuotaUnavailable):
            await reconcile(other, 1)
        await tenant.rows(
            "UPDATE gateways SET seen_at = now() - interval '1 hour' WHERE fence < (SELECT max(fence) FROM gateways)"
        )
        monkeypatch.setattr(other.maintenance.fences, "_connected_since", -1e9)
        assert await reconcile(other, 3) == 0
        monkeypatch.setattr(slow.maintenance.ledger, "settle", settle)
        other.maintenance.requests.active[tenant.tenant_id] = None
        assert await reconcile(other, 3) == 0
        assert await check_ledger(tenant, slow) == (30, 2)


async def test_requests_admitted_and_ended_during_a_comparison_are_no_drift(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as gateway:
        await spend(tenant, gateway)
        counters, settled = gateway.maintenance.counters, gateway.maintenance.counters.settled

        async def overtaken(*arguments: Any) -> Any:
            reply = await settled(*arguments)
            await spend(tenant, gateway)
            return reply

        monkeypatch.setattr(counters, "settled", overtaken)
        assert await reconcile(gateway, 4) == 0
        assert not gateway.maintenance.reconciliation._drifting


async def test_requests_admitted_without_counters_are_waited_for(database: Database, valkey_url: str) -> None:
    """The counters have no reservation of it, and its gateway has not updated them yet."""
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as gateway:
        await spend(tenant, gateway)
        for _ in range(3):
            gateway.maintenance.breaker.failed(math.inf)
        await spend(tenant, gateway)
        assert await reconcile(gateway, 3) == 0
        gateway.maintenance.breaker.close()
        assert await reconcile(gateway, 3) == 0
        await gateway.maintenance.settlements.retry()
        assert await reconcile(gateway, 3) == 0
        assert await check_ledger(tenant, gateway) == (30, 2)


async def test_busy_correct_counters_are_never_rebuilt(database: Database, valkey_url: str) -> None:
    """All requests use the same amount, so that pending amounts are often the same twice."""
    tenant, rolls = await make_tenant_with_gateways(database, valkey_url), random.Random(1)
    async with tenant.gateway() as first, tenant.gateway() as second:
        rounds = Counter[QuotaAdmissionController]()
        spent = Counter[QuotaAdmissionController]()

        async def work(gateway: QuotaAdmissionController) -> None:
            while spent[gateway] < WORKERS * ATTEMPTS or min(rounds[first], rounds[second]) <= ROUNDS:
                spent[gateway] += 1
                reservation = await gateway.admit(tenant.request())
                await asyncio.sleep(rolls.random() / 100)
                await gateway.settle(reservation, usage(reservation))

        async def look(gateway: QuotaAdmissionController) -> None:
            while not all(task.done() for task in working):
                await reconcile(gateway, 1)
                rounds[gateway] += 1
                await asyncio.sleep(0.002)

        working = [asyncio.create_task(work(gateway)) for gateway in (first, second) for _ in range(WORKERS)]
        await asyncio.gather(look(first), look(second))
        await asyncio.gather(*working)
        assert (first.reconciliation.rebuilt, second.reconciliation.rebuilt) == (0, 0)
        assert await first.maintenance.ledger.epoch(tenant.tenant_id) == 1
        expected = spent.total()
        assert await check_ledger(tenant, second) == (15 * expected, expected)


async def test_a_loss_under_busy_traffic_is_noticed(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as gateway, open_client(valkey_url) as client:

        async def work() -> None:
            while not gateway.reconciliation.rebuilt:
                await spend(tenant, gateway)

        await spend(tenant, gateway)
        await lose(client, tenant, "tokens", 15)
        working = [asyncio.create_task(work()) for _ in range(4)]
        async with asyncio.timeout(60):
            while not await reconcile(gateway, 1):
                await asyncio.sleep(0.02)
        await asyncio.gather(*working)
        assert gateway.reconciliation.rebuilt == 1
        await check_ledger(tenant, gateway)


async def test_few_tenants_in_each_round_and_each_in_its_turn(database: Database, valkey_url: str) -> None:
    tenants = [
        await make_tenant_with_gateways(database, valkey_url, name) for name in ("one", "two", "three")
    ]
    async with tenants[0].gateway(replace(SETTINGS, reconciled_at_once=2)) as gateway:
        for tenant in tenants:
            await spend(tenant, gateway)
        for left in (1, 0):
            await reconcile(gateway, 1)
            assert len(gateway.maintenance.requests.active) == left


async def test_tenants_that_were_not_reached_are_compared_later(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as gateway:
        await spend(tenant, gateway)
        async with closed(embedded_services, database):
            with pytest.raises(DatabaseUnavailable):
                await reconcile(gateway)
        assert [*gateway.maintenance.requests.active] == [tenant.tenant_id]
        assert await reconcile(gateway) == 0
        assert not gateway.maintenance.requests.active


async def test_a_standing_clock_causes_no_drift(database: Database, valkey_url: str) -> None:
    """After a failover to a server whose clock is behind by most of a minute."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as gateway, open_client(valkey_url) as client:
        await spend(tenant, gateway)
        state = tenant_key(tenant.tenant_id, "state")
        ahead = time.time_ns() // 1000 + 55_000_000
        await client.hset(state, "clock", str(ahead))
        for _ in range(3):
            await spend(tenant, gateway)
            assert await reconcile(gateway, 3) == 0
        await spend(tenant, gateway)
        await lose(client, tenant, "tokens", 15)
        assert await reconcile(gateway, 2) == 1
        assert int(await client.hget(state, "clock") or 0) >= ahead
        await spend(tenant, gateway)
        assert await reconcile(gateway, 3) == 1
        assert await check_ledger(tenant, gateway) == (90, 6)


async def test_records_of_a_clock_that_is_ahead_make_no_difference(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as gateway:
        await spend(tenant, gateway)
        async with await psycopg.AsyncConnection.connect(plain(database.url)) as connection:
            await connection.execute("SET session_replication_role = replica")
            await connection.execute("UPDATE usage_records SET admitted_at = now() + interval '15 seconds'")
        gateway.maintenance.requests.active[tenant.tenant_id] = None
        assert await reconcile(gateway, 3) == 0


async def test_tenants_are_compared_though_one_is_not_reached(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, tenant = (
        await make_tenant_with_gateways(database, valkey_url, "away"),
        await make_tenant_with_gateways(database, valkey_url),
    )
    async with tenant.gateway() as gateway, open_client(valkey_url) as client:
        for each in (away, tenant):
            await spend(each, gateway)
        await lose(client, tenant, "tokens", 15)
        settled = Counters.settled

        async def unless_away(counters: Counters, tenant_id: UUID) -> Any:
            if tenant_id == away.tenant_id:
                raise ValkeyUnavailable("its node is away")
            return await settled(counters, tenant_id)

        monkeypatch.setattr(Counters, "settled", unless_away)
        for _ in range(2):
            with pytest.raises(ValkeyUnavailable):
                await reconcile(gateway, 1)
        assert gateway.reconciliation.rebuilt == 1
        assert away.tenant_id in gateway.maintenance.requests.active
