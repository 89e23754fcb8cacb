"""Usage is never lost and never counted twice: answers that are lost, books that are closed, gateways taken for dead."""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
from tests.tenants.admission.gateways import (
    PRICE,
    SETTINGS,
    check_books,
    closed,
    make_house,
    open_client,
    read_only,
    usage,
    used,
)
from tests.tenants.counters.counting import age

from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.tenants.counters.counter_replies import Settled
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, ValkeyUnavailable
from loraplex.tenants.ledger.usage_ledger import LedgerWrite
from loraplex.tenants.quotas.reservation import LedgerUsage


async def test_usage_waits_for_books_that_are_closed(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as gateway:
        admissions = [await gateway.admit(house.request()) for _ in range(3)]
        async with closed(embedded_services, database):
            for admission in admissions:
                await gateway.settle(admission, usage(admission))
            with pytest.raises(DatabaseUnavailable):
                await gateway.admit(house.request())
            await gateway.upkeep.settlements.retry()
            assert len(gateway.upkeep.requests.unbooked) == 3
        await gateway.settle(admissions[0], usage(admissions[0]))
        await gateway.upkeep.settlements.retry()
        assert await check_books(house, gateway) == (45, 3)


async def test_nothing_is_admitted_while_too_much_usage_waits(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    house = await make_house(database, valkey_url)
    async with house.gateway(replace(SETTINGS, most_pending=1)) as gateway:
        admission = await gateway.admit(house.request())
        async with closed(embedded_services, database):
            await gateway.settle(admission, usage(admission))
            with pytest.raises(DatabaseUnavailable, match="too much usage"):
                await gateway.admit(house.request())


async def test_what_the_counters_are_being_told_is_not_told_again(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upkeep comes by while a settle is on its way: a second one would find nothing, and have the tenant seeded anew."""
    house = await make_house(database, valkey_url, tokens_per_minute=1000)
    async with house.gateway() as gateway:
        admission = await gateway.admit(house.request())
        settle, told = gateway.upkeep.counters.settle, []
        retried = asyncio.Event()

        async def slow(*arguments: Any, **more: Any) -> Any:
            told.append(arguments)
            await retried.wait()
            return await settle(*arguments, **more)

        monkeypatch.setattr(gateway.upkeep.counters, "settle", slow)
        settling = asyncio.create_task(gateway.settle(admission, usage(admission)))
        while not told:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(5):
            await gateway.upkeep.settlements.retry()
        retried.set()
        await settling
        assert len(told) == 1 and not gateway.upkeep.requests.uncounted
        assert await gateway.upkeep.books.epoch(house.tenant_id) == 1


async def test_an_answer_of_the_books_that_is_lost_counts_once(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as gateway, house.gateway() as other:
        admission = await gateway.admit(house.request())
        books, settle = gateway.upkeep.books, gateway.upkeep.books.settle

        async def lose(row: LedgerUsage) -> LedgerWrite:
            await settle(row)
            raise DatabaseUnavailable("the answer was lost")

        monkeypatch.setattr(books, "settle", lose)
        await gateway.settle(admission, usage(admission))
        monkeypatch.setattr(books, "settle", settle)
        await house.flush()
        await other.release(await other.admit(house.request()))
        await gateway.upkeep.settlements.retry()
        assert await check_books(house, gateway) == (15, 1)


async def test_who_was_given_up_and_lives_is_charged_in_full(database: Database, valkey_url: str) -> None:
    house, now = await make_house(database, valkey_url, tokens_per_day=1000), [0.0]
    async with house.gateway() as silent, house.gateway(clock=lambda: now[0]) as other:
        admission = await silent.admit(house.request())
        await other.release(await other.admit(house.request()))
        await other.upkeep.beat()
        now[0] += SETTINGS.lease_s
        await house.let_leases_run_out()
        assert await other.upkeep.reaper.reap() == 1
        assert (await used(other, house.tenant_id))["tokens_per_day"].reserved == 0
        await silent.settle(admission, usage(admission))
        assert await check_books(house, silent) == (15, 2)
        outcomes = await house.rows("SELECT outcome FROM usage_records ORDER BY outcome")
        assert [row["outcome"] for row in outcomes] == ["completed", "unknown"]


async def test_a_gateway_that_stood_still_kills_nobody(database: Database, valkey_url: str) -> None:
    """As when a whole machine sleeps: all leases on it run out together."""
    house, now = await make_house(database, valkey_url, tokens_per_day=1000), [0.0]
    async with house.gateway() as asleep, house.gateway(clock=lambda: now[0]) as other:
        admission = await asleep.admit(house.request())
        for _ in range(5):
            await other.upkeep.beat()
            now[0] += 10.0
        now[0] += 10 * SETTINGS.lease_s
        await house.let_leases_run_out()
        assert await other.upkeep.reaper.reap() == 0
        await other.upkeep.beat()
        assert await other.upkeep.reaper.reap() == 0
        await asleep.upkeep.beat()
        now[0] += SETTINGS.lease_s
        assert await other.upkeep.reaper.reap() == 0
        await asleep.settle(admission, usage(admission))
        assert await check_books(house, other) == (15, 1)


async def test_a_gateway_that_died_between_books_and_counters(database: Database, valkey_url: str) -> None:
    house, now = await make_house(database, valkey_url, tokens_per_day=1000), [0.0]
    async with house.gateway() as dead, house.gateway(clock=lambda: now[0]) as other:
        await other.release(await other.admit(house.request()))
        admission = await dead.admit(house.request())
        row = LedgerUsage(
            id=admission.id,
            tenant_id=house.tenant_id,
            api_key_id=house.key.api_key_id,
            adapter_id=None,
            digest=None,
            outcome="completed",
            prompt_tokens=10,
            amount_pico=PRICE.amount_pico(10, 0, 0),
            day=admission.hold.day,
            month=admission.hold.month,
            admitted_at=admission.admitted_at,
        )
        assert (await dead.upkeep.books.settle(row)).written
        assert (await used(other, house.tenant_id))["tokens_per_day"].reserved == 30
        await other.upkeep.beat()
        now[0] += SETTINGS.lease_s
        await house.let_leases_run_out()
        await other.release(await other.admit(house.request()))
        assert await other.upkeep.reaper.reap() == 0
        assert await check_books(house, other) == (10, 1)


async def test_leases_in_valkey_are_renewed_while_the_books_are_closed(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    house = await make_house(database, valkey_url, concurrent_requests=1)
    async with house.gateway() as gateway:
        admission = await gateway.admit(house.request())
        await house.let_leases_run_out()
        async with closed(embedded_services, database):
            with pytest.raises(DatabaseUnavailable):
                await gateway.upkeep.beat()
        assert (await used(gateway, house.tenant_id))["concurrent_requests"].used == 1
        await gateway.release(admission)


async def test_usage_waits_for_books_that_are_read_only(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as gateway:
        admission = await gateway.admit(house.request())
        async with read_only(embedded_services, database):
            for _ in range(2):
                with pytest.raises(DatabaseUnavailable):
                    await gateway.admit(house.request())
            with pytest.raises(DatabaseUnavailable):
                await gateway.upkeep.books.seed(house.tenant_id)
            await gateway.settle(admission, usage(admission))
            assert len(gateway.upkeep.requests.unbooked) == 1
        with contextlib.suppress(DatabaseUnavailable):
            await gateway.upkeep.books.known([])
        for _ in range(2):
            await gateway.upkeep.settlements.retry()
        assert await check_books(house, gateway) == (15, 1)


async def test_what_the_counters_missed_is_told_while_others_are_being_written(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy gateway something is always on its way into the books."""
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as gateway:
        missed, busy = [await gateway.admit(house.request()) for _ in range(2)]
        for _ in range(3):
            gateway.upkeep.breaker.failed()
        await gateway.settle(missed, usage(missed))
        gateway.upkeep.breaker.close()
        books, settle, goes_on = gateway.upkeep.books, gateway.upkeep.books.settle, asyncio.Event()

        async def slow(row: LedgerUsage) -> LedgerWrite:
            await goes_on.wait()
            return await settle(row)

        monkeypatch.setattr(books, "settle", slow)
        writing = asyncio.create_task(gateway.settle(busy, usage(busy)))
        await asyncio.sleep(0)
        await gateway.upkeep.settlements.retry()
        assert (await used(gateway, house.tenant_id))["tokens_per_day"].used == 15
        goes_on.set()
        await writing
        assert await check_books(house, gateway) == (30, 2)


async def test_a_late_settle_that_is_cancelled_is_counted_later(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two things are to be told of a request that was given up; who told them leaves after the first."""
    house, now = await make_house(database, valkey_url, tokens_per_day=1000), [0.0]
    async with house.gateway() as silent, house.gateway(clock=lambda: now[0]) as other:
        admission = await silent.admit(house.request())
        await other.release(await other.admit(house.request()))
        await other.upkeep.beat()
        now[0] += SETTINGS.lease_s
        await house.let_leases_run_out()
        assert await other.upkeep.reaper.reap() == 1
        counters, settle = silent.upkeep.counters, silent.upkeep.counters.settle

        async def leave(*_: object, **__: object) -> Settled:
            raise asyncio.CancelledError

        monkeypatch.setattr(counters, "settle", leave)
        with pytest.raises(asyncio.CancelledError):
            await silent.settle(admission, usage(admission))
        monkeypatch.setattr(counters, "settle", settle)
        await silent.upkeep.settlements.retry()
        assert await check_books(house, silent) == (15, 2)


async def test_a_charge_that_is_repeated_too_late_is_not_counted_twice(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was lost, and Valkey out of reach for longer than the counters remember an end."""
    house, now = await make_house(database, valkey_url, tokens_per_day=1000), [0.0]
    async with house.gateway(clock=lambda: now[0]) as gateway, open_client(valkey_url) as client:
        admission = await gateway.admit(house.request())
        counters, settle = gateway.upkeep.counters, gateway.upkeep.counters.settle

        async def lose(*arguments: Any, **more: Any) -> Settled:
            await settle(*arguments, **more)
            raise ValkeyUnavailable("the answer was lost")

        monkeypatch.setattr(counters, "settle", lose)
        await gateway.settle(admission, usage(admission))
        monkeypatch.setattr(counters, "settle", settle)
        now[0] += 900.0
        await age(client, house.tenant_id, 900.0)
        await gateway.upkeep.settlements.retry()
        assert await check_books(house, gateway) == (15, 1)


@pytest.mark.parametrize("admitted_before", [False, True])
async def test_a_seed_under_way_that_knows_nothing_of_a_request_without_counters(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch, admitted_before: bool
) -> None:
    """It read the books before the request was reserved, and arrives after it was settled."""
    house = await make_house(database, valkey_url)
    async with house.gateway() as seeding, house.gateway() as gateway:
        await gateway.release(await gateway.admit(house.request()))
        if not admitted_before:
            await house.flush()
        epoch, seed = await seeding.upkeep.books.seed(house.tenant_id)
        for _ in range(3):
            gateway.upkeep.breaker.failed()
        admission = await gateway.admit(house.request())
        assert admission.degraded
        gateway.upkeep.breaker.close()
        await gateway.settle(admission, usage(admission))
        await seeding.upkeep.counters.seed(house.tenant_id, epoch, seed)
        assert await check_books(house, gateway) == (15, 1)
