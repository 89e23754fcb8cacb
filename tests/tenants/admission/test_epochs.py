"""Each step of the protocol of epochs, held up at the very place where another comes between."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text
from tests.tenants.admission.gateways import House, check_books, make_house, open_client, usage, used

from loraplex.tenants.admission.controller import QuotaAdmissionController, usage_row
from loraplex.tenants.admission.counter_rebuild import CounterRebuild
from loraplex.tenants.database import Database
from loraplex.tenants.errors import PolicyStale
from loraplex.tenants.ledger.statements import NEXT_EPOCH
from loraplex.tenants.ledger.usage_ledger import Reserved
from loraplex.tenants.quotas.reservation import LedgerReservation
from loraplex.tenants.valkey import tenant_key


async def reseed(house: House, gateway: QuotaAdmissionController) -> None:
    """Valkey loses everything, and somebody comes and finds it so."""
    await house.flush()
    await gateway.release(await gateway.admit(house.request(1, 1)))


async def test_a_reservation_of_counters_that_were_replaced_is_not_kept(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=40)
    told: list[Reserved] = []
    async with house.gateway() as slow, house.gateway() as other:
        await other.release(await other.admit(house.request(1, 1)))
        reserve = slow.upkeep.books.reserve

        async def overtaken(row: LedgerReservation) -> Any:
            if not told:
                await reseed(house, other)
            answer = await reserve(row)
            told.append(answer.outcome)
            return answer

        monkeypatch.setattr(slow.upkeep.books, "reserve", overtaken)
        admission = await slow.admit(house.request())
        assert told == [Reserved.EPOCH_MOVED, Reserved.KEPT]
        assert admission.hold.epoch == 2
        assert (await used(other, house.tenant_id))["tokens_per_day"].reserved == 30
        await slow.settle(admission, usage(admission))
        assert await check_books(house, slow) == (15, 1)


async def test_usage_waits_for_a_seeding_and_belongs_to_its_epoch(
    database: Database, valkey_url: str
) -> None:
    house = await make_house(database, valkey_url)
    async with house.gateway() as gateway:
        admission = await gateway.admit(house.request())
        row = usage_row(admission, usage(admission), 1000)
        async with database.as_writer() as seeding:
            await seeding.execute(NEXT_EPOCH, {"tenant_id": house.tenant_id, "above": 0})
            settling = asyncio.create_task(gateway.upkeep.books.settle(row))
            await asyncio.wait({settling}, timeout=0.2)
            assert not settling.done()
            open_then = await seeding.scalar(text("SELECT count(*) FROM reservations"))
        assert open_then == 1
        assert (await settling).epoch == 2


async def test_a_seed_that_was_read_before_the_usage_brings_nothing_back(
    database: Database, valkey_url: str
) -> None:
    house = await make_house(database, valkey_url, concurrent_requests=1)
    async with house.gateway() as gateway, house.gateway() as seeding:
        admission = await gateway.admit(house.request())
        books, counters = seeding.upkeep.books, seeding.upkeep.counters
        epoch, seed = await books.seed(house.tenant_id)
        assert len(seed.holds) == 1
        await gateway.settle(admission, usage(admission))
        assert await counters.seed(house.tenant_id, epoch, seed) > epoch
        assert await check_books(house, gateway) == (15, 1)


async def test_usage_that_a_seeding_has_counted_is_not_counted_again(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as slow, house.gateway() as other:
        admission = await slow.admit(house.request())
        settle = slow.upkeep.counters.settle

        async def overtaken(*arguments: Any, **more: Any) -> Any:
            await reseed(house, other)
            return await settle(*arguments, **more)

        monkeypatch.setattr(slow.upkeep.counters, "settle", overtaken)
        await slow.settle(admission, usage(admission))
        assert await check_books(house, slow) == (15, 1)


async def test_a_policy_that_changes_between_counters_and_books_is_seen(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as gateway:
        reserve = gateway.upkeep.books.reserve

        async def overtaken(row: LedgerReservation) -> Any:
            async with database.as_operator() as session:
                await session.execute(text("UPDATE tenants SET suspended_at = now()"))
            return await reserve(row)

        monkeypatch.setattr(gateway.upkeep.books, "reserve", overtaken)
        with pytest.raises(PolicyStale):
            await gateway.admit(house.request())
        assert await check_books(house, gateway) == (0, 0)


async def test_who_comes_late_to_a_seeding_does_not_repeat_it(database: Database, valkey_url: str) -> None:
    """It was told that there are no counters, and asks to seed them when the lock of those who did has run out."""
    house = await make_house(database, valkey_url, tokens_per_minute=100)
    async with house.gateway() as gateway, open_client(valkey_url) as client:
        await gateway.release(await gateway.admit(house.request()))
        await client.delete(tenant_key(house.tenant_id, "seeding"))
        upkeep = gateway.upkeep
        assert await CounterRebuild(upkeep.books, upkeep.counters, client, uuid4()).try_seed(house.tenant_id)
        admission = await gateway.admit(house.request())
        assert admission.hold.epoch == 1
        await gateway.release(admission)
        await house.flush()
        assert await CounterRebuild(upkeep.books, upkeep.counters, client, uuid4()).try_seed(house.tenant_id)
        assert await upkeep.books.epoch(house.tenant_id) == 2
