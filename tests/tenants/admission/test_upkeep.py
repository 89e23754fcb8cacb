"""A gateway that runs renews its leases, says that it lives, finds its way back to Valkey, and takes its leave."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.tenants.admission.house import House, check_books, make_house, usage, used

from loraplex.tenants.admission.admission import AdmissionSettings
from loraplex.tenants.admission.admissions import Admissions
from loraplex.tenants.database import Database

QUICK = AdmissionSettings(valkey_s=10.0, heartbeat_s=0.05, probe_s=0.05, retry_s=0.05)
PATIENCE_SECONDS = 20.0


@asynccontextmanager
async def running(house: House) -> AsyncIterator[Admissions]:
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
