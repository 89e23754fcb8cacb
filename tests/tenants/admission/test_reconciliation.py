"""Counters that lost writes and lived are noticed and seeded anew; correct ones never are, however busy."""

import asyncio
import random
import time
from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg
import pytest
from redis.asyncio import Redis
from tests.tenants.admission.gateways import (
    SETTINGS,
    House,
    check_books,
    closed,
    make_house,
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
from loraplex.tenants.errors import DatabaseUnavailable, RateLimited, ValkeyUnavailable
from loraplex.tenants.valkey import tenant_key

WORKERS, ATTEMPTS = 8, 25


async def spend(house: House, gateway: QuotaAdmissionController) -> None:
    admission = await gateway.admit(house.request())
    await gateway.settle(admission, usage(admission))


async def lose(client: Redis, house: House, field: str, amount: int) -> None:
    """What was written last, of the tenant's day and month; negative: what nobody settled is there."""
    pattern = f"{tenant_key(house.tenant_id)}:*:use:tenant:*"
    async for key in client.scan_iter(pattern, count=1000):
        await client.hincrby(key, field, -amount)


async def compare(gateway: QuotaAdmissionController, rounds: int = 2) -> int:
    for _ in range(rounds):
        await gateway.upkeep.comparison.compare()
    return gateway.counters_mended


@pytest.mark.parametrize(("field", "amount"), [("tokens", 15), ("amount", 7), ("tokens", -100)])
async def test_lost_writes_are_noticed_and_mended(
    database: Database, valkey_url: str, field: str, amount: int
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as gateway, open_client(valkey_url) as client:
        for _ in range(3):
            await spend(house, gateway)
        await lose(client, house, field, amount)
        assert await compare(gateway, 1) == 0
        assert await compare(gateway, 1) == 1
        assert await check_books(house, gateway) == (45, 3)
        await spend(house, gateway)
        assert await compare(gateway, 3) == 1


async def test_counters_that_lost_writes_start_with_empty_buckets(
    database: Database, valkey_url: str
) -> None:
    """They may have lost what was taken from the buckets, too."""
    house = await make_house(database, valkey_url, requests_per_minute=60)
    async with house.gateway() as gateway, open_client(valkey_url) as client:
        await spend(house, gateway)
        await lose(client, house, "tokens", 1)
        assert await compare(gateway) == 1
        assert (await used(gateway, house.tenant_id))["requests_per_minute"].used >= 55
        with pytest.raises(RateLimited):
            for _ in range(10):
                await gateway.admit(house.request())


async def test_one_of_two_gateways_mends(database: Database, valkey_url: str) -> None:
    house = await make_house(database, valkey_url)
    async with house.gateway() as first, house.gateway() as second, open_client(valkey_url) as client:
        for gateway in (first, second):
            await spend(house, gateway)
        await lose(client, house, "tokens", 15)
        for _ in range(3):
            await asyncio.gather(*(compare(gateway, 1) for gateway in (first, second)))
        assert first.counters_mended + second.counters_mended == 1
        assert await check_books(house, first) == (30, 2)


async def test_usage_on_its_way_is_no_difference(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the books, and its gateway does not come to tell the counters: neither this one nor another."""
    house = await make_house(database, valkey_url)
    async with house.gateway() as slow, house.gateway() as other:
        await spend(house, other)
        admission = await slow.admit(house.request())
        counters, settle = slow.upkeep.counters, slow.upkeep.counters.settle

        async def fail(*_: object, **__: object) -> Settled:
            raise ValkeyUnavailable("away")

        monkeypatch.setattr(counters, "settle", fail)
        await slow.settle(admission, usage(admission))
        monkeypatch.setattr(counters, "settle", settle)
        other.upkeep.requests.active[house.tenant_id] = None
        assert (await compare(slow, 3), await compare(other, 3)) == (0, 0)
        assert not other.upkeep.requests.active
        await slow.upkeep.settlements.retry()
        assert await check_books(house, slow) == (30, 2)


async def test_what_is_let_in_and_ends_while_it_is_compared_is_no_difference(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await make_house(database, valkey_url)
    async with house.gateway() as gateway:
        await spend(house, gateway)
        counters, settled = gateway.upkeep.counters, gateway.upkeep.counters.settled

        async def overtaken(*arguments: Any) -> Any:
            answer = await settled(*arguments)
            await spend(house, gateway)
            return answer

        monkeypatch.setattr(counters, "settled", overtaken)
        assert await compare(gateway, 4) == 0
        assert not gateway.upkeep.comparison._differing


async def test_what_was_let_in_without_counters_is_waited_for(database: Database, valkey_url: str) -> None:
    """The counters do not hold it, and its gateway has still to tell them of it."""
    house = await make_house(database, valkey_url)
    async with house.gateway() as gateway:
        await spend(house, gateway)
        for _ in range(3):
            gateway.upkeep.breaker.failed()
        await spend(house, gateway)
        assert await compare(gateway, 3) == 0
        gateway.upkeep.breaker.close()
        assert await compare(gateway, 3) == 0
        await gateway.upkeep.settlements.retry()
        assert await compare(gateway, 3) == 0
        assert await check_books(house, gateway) == (30, 2)


async def test_busy_correct_traffic_is_never_seeded_anew(database: Database, valkey_url: str) -> None:
    """All requests use the same, so that what is on its way is often the same twice."""
    house, rolls = await make_house(database, valkey_url), random.Random(1)
    async with house.gateway() as first, house.gateway() as second:

        async def work(gateway: QuotaAdmissionController) -> None:
            for _ in range(ATTEMPTS):
                admission = await gateway.admit(house.request())
                await asyncio.sleep(rolls.random() / 100)
                await gateway.settle(admission, usage(admission))

        async def look(gateway: QuotaAdmissionController) -> int:
            rounds = 0
            while not all(task.done() for task in working):
                await compare(gateway, 1)
                rounds += 1
                await asyncio.sleep(0.002)
            return rounds

        working = [asyncio.create_task(work(gateway)) for gateway in (first, second) for _ in range(WORKERS)]
        assert min(await asyncio.gather(look(first), look(second))) > 10
        await asyncio.gather(*working)
        assert (first.counters_mended, second.counters_mended) == (0, 0)
        assert await first.upkeep.books.epoch(house.tenant_id) == 1
        expected = 2 * WORKERS * ATTEMPTS
        assert await check_books(house, second) == (15 * expected, expected)


async def test_a_loss_under_busy_traffic_is_noticed(database: Database, valkey_url: str) -> None:
    house = await make_house(database, valkey_url)
    async with house.gateway() as gateway, open_client(valkey_url) as client:

        async def work() -> None:
            while not gateway.counters_mended:
                await spend(house, gateway)

        await spend(house, gateway)
        await lose(client, house, "tokens", 15)
        working = [asyncio.create_task(work()) for _ in range(4)]
        async with asyncio.timeout(30):
            while not await compare(gateway, 1):
                await asyncio.sleep(0.02)
        await asyncio.gather(*working)
        assert gateway.counters_mended == 1
        await check_books(house, gateway)


async def test_few_tenants_in_each_round_and_each_in_its_turn(database: Database, valkey_url: str) -> None:
    houses = [await make_house(database, valkey_url, name) for name in ("one", "two", "three")]
    async with houses[0].gateway(replace(SETTINGS, compared_at_once=2)) as gateway:
        for house in houses:
            await spend(house, gateway)
        for left in (1, 0):
            await compare(gateway, 1)
            assert len(gateway.upkeep.requests.active) == left


async def test_who_could_not_be_compared_is_compared_later(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    house = await make_house(database, valkey_url)
    async with house.gateway() as gateway:
        await spend(house, gateway)
        async with closed(embedded_services, database):
            with pytest.raises(DatabaseUnavailable):
                await compare(gateway)
        assert [*gateway.upkeep.requests.active] == [house.tenant_id]
        assert await compare(gateway) == 0
        assert not gateway.upkeep.requests.active


async def test_a_clock_that_stands_makes_no_difference(database: Database, valkey_url: str) -> None:
    """After a failover to a server whose clock is behind by an hour."""
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as gateway, open_client(valkey_url) as client:
        await spend(house, gateway)
        state = tenant_key(house.tenant_id, "state")
        ahead = time.time_ns() // 1000 + 3_600_000_000
        await client.hset(state, "clock", str(ahead))
        for _ in range(3):
            await spend(house, gateway)
            assert await compare(gateway, 3) == 0
        await spend(house, gateway)
        await lose(client, house, "tokens", 15)
        assert await compare(gateway, 2) == 1
        assert int(await client.hget(state, "clock") or 0) >= ahead
        await spend(house, gateway)
        assert await compare(gateway, 3) == 1
        assert await check_books(house, gateway) == (90, 6)


async def test_records_of_a_clock_that_is_ahead_make_no_difference(
    database: Database, valkey_url: str
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as gateway:
        await spend(house, gateway)
        async with await psycopg.AsyncConnection.connect(plain(database.url)) as connection:
            await connection.execute("SET session_replication_role = replica")
            await connection.execute("UPDATE usage_records SET admitted_at = now() + interval '15 seconds'")
        gateway.upkeep.requests.active[house.tenant_id] = None
        assert await compare(gateway, 3) == 0


async def test_tenants_are_compared_though_one_is_not_reached(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, house = await make_house(database, valkey_url, "away"), await make_house(database, valkey_url)
    async with house.gateway() as gateway, open_client(valkey_url) as client:
        for each in (away, house):
            await spend(each, gateway)
        await lose(client, house, "tokens", 15)
        settled = Counters.settled

        async def unless_away(counters: Counters, tenant_id: UUID) -> Any:
            if tenant_id == away.tenant_id:
                raise ValkeyUnavailable("its node is away")
            return await settled(counters, tenant_id)

        monkeypatch.setattr(Counters, "settled", unless_away)
        for _ in range(2):
            with pytest.raises(ValkeyUnavailable):
                await compare(gateway, 1)
        assert gateway.counters_mended == 1
        assert away.tenant_id in gateway.upkeep.requests.active
