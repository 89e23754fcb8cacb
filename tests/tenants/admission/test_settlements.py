"""Usage is never lost and never counted twice: answers that are lost, books that are closed, gateways taken for dead."""

from dataclasses import replace

import pytest
from tests.tenants.admission.house import PRICE, SETTINGS, check_books, closed, make_house, usage, used

from loraplex.platform.embedded import EmbeddedServices
from loraplex.tenants.admission.rows import Booked, UsageRow
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable


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


async def test_an_answer_of_the_books_that_is_lost_counts_once(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await make_house(database, valkey_url, tokens_per_day=1000)
    async with house.gateway() as gateway, house.gateway() as other:
        admission = await gateway.admit(house.request())
        books, settle = gateway.upkeep.books, gateway.upkeep.books.settle

        async def lose(row: UsageRow) -> Booked:
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


async def test_a_gateway_that_died_between_books_and_counters(database: Database, valkey_url: str) -> None:
    house, now = await make_house(database, valkey_url, tokens_per_day=1000), [0.0]
    async with house.gateway() as dead, house.gateway(clock=lambda: now[0]) as other:
        await other.release(await other.admit(house.request()))
        admission = await dead.admit(house.request())
        row = UsageRow(
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
