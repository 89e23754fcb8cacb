"""A gateway that runs renews its leases, says that it lives, finds its way back to Valkey, and takes its leave."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from tests.tenants.admission.gateways import House, check_books, make_house, open_client, usage, used
from tests.tenants.counters.counting import age

from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.counters.counter_replies import Heartbeat
from loraplex.tenants.database import Database
from loraplex.tenants.errors import RateLimited, ValkeyUnavailable
from loraplex.tenants.quotas.reservation import ReservedAmounts

QUICK = AdmissionConfig(valkey_s=10.0, heartbeat_s=0.05, probe_s=0.05, retry_s=0.05)
PATIENCE_SECONDS = 20.0


@asynccontextmanager
async def running(house: House) -> AsyncIterator[QuotaAdmissionController]:
    async with house.gateway(QUICK) as gateway:
        task = asyncio.create_task(gateway.run())
        yield gateway
        task.cancel()
        await asyncio.wait({task})


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await holds():
            await asyncio.sleep(0.02)


async def test_what_runs_is_vouched_for(database: Database, valkey_url: str) -> None:
    house = await make_house(database, valkey_url, concurrent_requests=1)

    async def renewed() -> bool:
        rows = await house.rows("SELECT expires_at > now() AS live FROM reservations")
        uses = await used(gateway, house.tenant_id)
        return [row["live"] for row in rows] == [True] and uses["concurrent_requests"].used == 1

    async with running(house) as gateway:
        admission = await gateway.admit(house.request())
        await house.let_leases_run_out()
        await until(renewed)
        await gateway.settle(admission, usage(admission))
        assert await check_books(house, gateway) == (15, 1)


async def test_gateways_count_each_other_while_they_live(database: Database, valkey_url: str) -> None:
    house = await make_house(database, valkey_url)

    async def two() -> bool:
        return first.upkeep.share.live_gateways == 2

    async def one() -> bool:
        return first.upkeep.share.live_gateways == 1

    async with running(house) as first:
        async with running(house):
            await until(two)
        await until(one)
    assert await house.rows("SELECT id FROM gateways") == []


async def test_the_way_back_to_valkey(database: Database, valkey_url: str) -> None:
    house = await make_house(database, valkey_url)

    async def settled() -> bool:
        return not gateway.upkeep.requests.uncounted

    async with running(house) as gateway:
        await gateway.release(await gateway.admit(house.request()))
        for _ in range(3):
            gateway.upkeep.breaker.failed()
        degraded = await gateway.admit(house.request())
        assert degraded.degraded
        await gateway.settle(degraded, usage(degraded))
        await until(settled)
        assert await check_books(house, gateway) == (15, 1)


async def test_no_failure_ends_a_task(database: Database, valkey_url: str) -> None:
    """A tenant that is gone cannot be seeded, and PostgreSQL says so with an error that nobody expects."""
    house = await make_house(database, valkey_url)

    async def lives() -> bool:
        rows = await house.rows("SELECT id FROM gateways WHERE seen_at > %(since)s", since=since)
        return bool(rows)

    async with running(house) as gateway:
        gateway.upkeep.requests.reseed.add(uuid4())
        await asyncio.sleep(0.3)
        since = datetime.now(UTC)
        await until(lives)
        gateway.upkeep.requests.reseed.clear()


async def test_a_tenant_whose_node_is_away_keeps_no_other_from_being_renewed(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = await make_house(database, valkey_url, "away", concurrent_requests=1)
    house = await make_house(database, valkey_url, concurrent_requests=1)
    async with house.gateway() as gateway, open_client(valkey_url) as client:
        for each in (away, house):
            await gateway.admit(each.request())
        heartbeat = gateway.upkeep.counters.heartbeat

        async def partly(tenant_id: UUID, holds: Sequence[ReservedAmounts]) -> Heartbeat:
            if tenant_id == away.tenant_id:
                raise ValkeyUnavailable("this node is away")
            return await heartbeat(tenant_id, holds)

        monkeypatch.setattr(gateway.upkeep.counters, "heartbeat", partly)
        await age(client, house.tenant_id, 40.0)
        with pytest.raises(ValkeyUnavailable):
            await gateway.upkeep.beat()
        await age(client, house.tenant_id, 10.0)
        with pytest.raises(RateLimited):
            await gateway.admit(house.request())
