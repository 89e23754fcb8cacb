"""A running gateway renews its leases, reports that it is alive, returns to Valkey, and removes itself at its end."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from tests.tenants.admission.gateways import (
    TenantWithGateways,
    check_ledger,
    make_tenant_with_gateways,
    open_client,
    usage,
    used,
)
from tests.tenants.counters.limited_tenant import age

from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.counters.counter_replies import Heartbeat
from loraplex.tenants.database import Database
from loraplex.tenants.errors import RateLimited, ValkeyUnavailable
from loraplex.tenants.quotas.reservation import Reservation

QUICK = AdmissionConfig(valkey_s=10.0, heartbeat_s=0.05, probe_s=0.05, retry_s=0.05)
PATIENCE_SECONDS = 180.0


@asynccontextmanager
async def running(tenant: TenantWithGateways) -> AsyncIterator[QuotaAdmissionController]:
    async with tenant.gateway(QUICK) as gateway:
        task = asyncio.create_task(gateway.maintenance.run())
        yield gateway
        task.cancel()
        await asyncio.wait({task})


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_leases_of_running_requests_are_renewed(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, concurrent_requests=1)

    async def renewed() -> bool:
        rows = await tenant.rows("SELECT expires_at > now() AS live FROM reservations")
        uses = await used(gateway, tenant.tenant_id)
        return [row["live"] for row in rows] == [True] and uses["concurrent_requests"].used == 1

    async with running(tenant) as gateway:
        reservation = await gateway.admit(tenant.request())
        await tenant.let_leases_run_out()
        await until(renewed)
        await gateway.settle(reservation, usage(reservation))
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_gateways_count_each_other_while_they_live(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)

    async def two() -> bool:
        return first.maintenance.local_limiter.live_gateways == 2

    async def one() -> bool:
        return first.maintenance.local_limiter.live_gateways == 1

    async with running(tenant) as first:
        async with running(tenant):
            await until(two)
        await until(one)
    assert await tenant.rows("SELECT id FROM gateways") == []


async def test_the_way_back_to_valkey(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)

    async def settled() -> bool:
        return not gateway.maintenance.requests.pending_counter_updates

    async with running(tenant) as gateway:
        await gateway.cancel(await gateway.admit(tenant.request()))
        for _ in range(3):
            gateway.maintenance.breaker.failed(math.inf)
        degraded = await gateway.admit(tenant.request())
        assert degraded.degraded
        await gateway.settle(degraded, usage(degraded))
        # What is shipped while the breaker is open waits for the probe.
        await tenant.shipped()
        await until(settled)
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_no_failure_ends_a_task(database: Database, valkey_url: str) -> None:
    """A deleted tenant cannot be rebuilt: PostgreSQL raises an unexpected error."""
    tenant = await make_tenant_with_gateways(database, valkey_url)

    async def lives() -> bool:
        rows = await tenant.rows("SELECT id FROM gateways WHERE seen_at > %(since)s", since=since)
        return bool(rows)

    async with running(tenant) as gateway:
        gateway.maintenance.requests.to_rebuild.add(uuid4())
        await asyncio.sleep(0.3)
        since = datetime.now(UTC)
        await until(lives)
        gateway.maintenance.requests.to_rebuild.clear()


async def test_a_tenant_whose_node_is_away_keeps_no_other_from_being_renewed(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = await make_tenant_with_gateways(database, valkey_url, "away", concurrent_requests=1)
    tenant = await make_tenant_with_gateways(database, valkey_url, concurrent_requests=1)
    async with tenant.gateway() as gateway, open_client(valkey_url) as client:
        for each in (away, tenant):
            await gateway.admit(each.request())
        heartbeat = gateway.maintenance.counters.heartbeat

        async def partly(tenant_id: UUID, reservations: Sequence[Reservation]) -> Heartbeat:
            if tenant_id == away.tenant_id:
                raise ValkeyUnavailable("this node is away")
            return await heartbeat(tenant_id, reservations)

        monkeypatch.setattr(gateway.maintenance.counters, "heartbeat", partly)
        await age(client, tenant.tenant_id, 40.0)
        with pytest.raises(ValkeyUnavailable):
            await gateway.maintenance.heartbeat()
        await age(client, tenant.tenant_id, 10.0)
        with pytest.raises(RateLimited):
            await gateway.admit(tenant.request())
