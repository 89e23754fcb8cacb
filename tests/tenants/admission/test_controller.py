"""A request is admitted by counters and books together, and settled once."""

import asyncio
from dataclasses import replace

import psycopg
import pytest
from sqlalchemy import text
from tests.tenants.admission.gateways import check_books, make_house, plain, set_limits, usage, used

from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS
from loraplex.tenants.database import Database
from loraplex.tenants.errors import PolicyStale, QuotaExhausted, RateLimited


@pytest.mark.parametrize("postgres_major", POSTGRES_MAJORS, indirect=True)
async def test_what_is_admitted_is_reserved_and_settled_once(database: Database, valkey_url: str) -> None:
    house = await make_house(database, valkey_url, requests_per_minute=60, tokens_per_day=100)
    async with house.gateway() as gateway:
        admission = await gateway.admit(house.request(prompt=10, completion=20))
        assert admission.rate.requests is not None
        assert (admission.rate.requests.limit, admission.rate.requests.remaining) == (60, 59)
        assert (await used(gateway, house.tenant_id))["tokens_per_day"].reserved == 30
        assert len(await house.rows("SELECT id FROM reservations")) == 1
        await asyncio.gather(*(gateway.settle(admission, usage(admission)) for _ in range(3)))
        await gateway.release(admission)
        assert await check_books(house, gateway) == (15, 1)


async def test_work_may_begin_when_the_counters_have_it_and_before_the_books_do(
    database: Database, valkey_url: str
) -> None:
    house = await make_house(database, valkey_url, requests_per_minute=2)
    async with house.gateway() as gateway:
        await gateway.release(await gateway.admit(house.request()))
        let_in: list[str] = []
        async with await psycopg.AsyncConnection.connect(plain(database.url)) as other:
            # As a seeding holds it.
            await other.execute("UPDATE admission_epochs SET epoch = epoch")
            admitting = asyncio.create_task(gateway.admit(house.request(), lambda: let_in.append("")))
            async with asyncio.timeout(5):
                while not let_in:
                    await asyncio.sleep(0.001)
            assert not admitting.done() and await house.rows("SELECT id FROM reservations") == []
        await gateway.settle(admission := await admitting, usage(admission))
        with pytest.raises(RateLimited):
            await gateway.admit(house.request(), lambda: pytest.fail("denied, and let in"))
        stale = house.request(key=replace(house.key, policy_epoch=0))
        with pytest.raises(PolicyStale):
            await gateway.admit(stale, lambda: pytest.fail("stale, and let in"))


async def test_what_is_released_was_never_there(database: Database, valkey_url: str) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=30)
    async with house.gateway() as gateway:
        await gateway.release(await gateway.admit(house.request()))
        await gateway.release(await gateway.admit(house.request()))
        assert await check_books(house, gateway) == (0, 0)


async def test_refusals_name_the_limit(database: Database, valkey_url: str) -> None:
    house = await make_house(
        database, valkey_url, concurrent_requests=1, tokens_per_day=40, requests_per_minute=10
    )
    async with house.gateway() as gateway:
        admission = await gateway.admit(house.request())
        with pytest.raises(RateLimited) as refused:
            await gateway.admit(house.request(5, 5))
        assert (refused.value.limit, refused.value.level) == ("concurrent_requests", "tenant")
        rate = refused.value.rate
        assert rate is not None and rate.requests is not None and rate.requests.limit == 10
        await gateway.settle(admission, usage(admission))
        with pytest.raises(QuotaExhausted) as exhausted:
            await gateway.admit(request := house.request())
        assert (exhausted.value.limit, exhausted.value.limit_value) == ("tokens_per_day", 40)
        explanation = await gateway.explain(house.tenant_id, request.request_id)
        assert explanation is not None
        assert [decision.name for decision in explanation.decisions if not decision.passed] == [
            "tokens_per_day"
        ]


@pytest.mark.parametrize("published", [True, False])
async def test_a_changed_limit_is_in_force_for_the_next_request(
    database: Database, valkey_url: str, published: bool
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as first, house.gateway() as second:
        await second.release(await second.admit(house.request()))
        newer = await set_limits(house, tokens_per_day=20)
        if published:
            await first.publish(house.tenant_id)
        with pytest.raises(PolicyStale):
            await second.admit(house.request())
        with pytest.raises(QuotaExhausted):
            await second.admit(house.request(key=newer))
        assert await check_books(house, second) == (0, 0)


async def test_lost_counters_are_seeded_from_the_books(database: Database, valkey_url: str) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=100, concurrent_requests=2)
    async with house.gateway() as first, house.gateway() as second:
        done, running = [await first.admit(house.request()) for _ in range(2)]
        await first.settle(done, usage(done))
        await house.flush()
        lasting = await second.admit(house.request())
        uses = await used(second, house.tenant_id)
        assert (uses["tokens_per_day"].used, uses["tokens_per_day"].reserved) == (15, 60)
        with pytest.raises(RateLimited):
            await first.admit(house.request(1, 1))
        await first.settle(running, usage(running))
        await second.settle(lasting, usage(lasting))
        assert await check_books(house, first) == (45, 3)


async def test_an_epoch_that_is_locked_for_a_moment_is_waited_for(
    database: Database, valkey_url: str
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=100)
    async with house.gateway() as gateway:
        first = await gateway.admit(house.request())
        async with database.as_writer() as session:
            await session.execute(text("UPDATE admission_epochs SET epoch = epoch"))
            admitting = asyncio.create_task(gateway.admit(house.request()))
            await asyncio.sleep(0.02)
            assert not admitting.done()
        second = await admitting
        assert first.hold.epoch == second.hold.epoch == 1


async def test_books_restored_from_a_backup_catch_up_with_the_counters(
    database: Database, valkey_url: str
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=100)
    async with house.gateway() as gateway:
        for _ in range(4):
            await house.flush()
            await gateway.release(await gateway.admit(house.request()))
        async with database.as_operator() as session:
            await session.execute(text("DELETE FROM admission_epochs"))
        admission = await gateway.admit(house.request())
        assert admission.hold.epoch == 5
        await gateway.settle(admission, usage(admission))
        assert await check_books(house, gateway) == (15, 1)
