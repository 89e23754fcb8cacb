"""Who asks may leave at every await: nothing stays held, nothing is lost, nothing is counted twice."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from tests.tenants.admission.gateways import SETTINGS, House, check_books, make_house, set_limits, usage, used

from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, PolicyStale
from loraplex.tenants.ledger.usage_ledger import Reserved, ReservedUnder
from loraplex.tenants.quotas.reservation import LedgerReservation, Reservation

MAX_STEPS = 400


async def left_after(steps: int, work: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Whether it was over after so many steps of the event loop, else it was cancelled; and what it returned nevertheless,
    since Python 3.11 loses a cancellation that meets the end of a wait inside `asyncio.wait_for`."""
    task = asyncio.create_task(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    over = task.done()
    task.cancel()
    await asyncio.wait({task})
    return over, None if task.cancelled() else task.result()


async def held(gateway: QuotaAdmissionController, house: House) -> tuple[int, int]:
    """Requests and tokens that the counters hold, once what failed was repeated."""
    await gateway.upkeep.settlements.retry()
    uses = await used(gateway, house.tenant_id)
    return uses["concurrent_requests"].used, uses["tokens_per_day"].reserved


async def test_an_admission_may_be_cancelled_at_every_await(database: Database, valkey_url: str) -> None:
    house = await make_house(database, valkey_url, concurrent_requests=1, tokens_per_day=1000)
    async with house.gateway() as gateway:
        await gateway.release(await gateway.admit(house.request()))
        for steps in range(1, MAX_STEPS):
            over, admission = await left_after(steps, gateway.admit(house.request()))
            if isinstance(admission, Reservation):
                await gateway.release(admission)
            assert await held(gateway, house) == (0, 0), steps
            if over:
                break
        assert over
        await house.rows("DELETE FROM reservations")
        assert await check_books(house, gateway) == (0, 0)


async def test_a_settle_may_be_cancelled_at_every_await(database: Database, valkey_url: str) -> None:
    house = await make_house(database, valkey_url, concurrent_requests=1, tokens_per_day=100_000)
    async with house.gateway() as gateway:
        for steps in range(1, MAX_STEPS):
            admission = await gateway.admit(house.request())
            over, _ = await left_after(steps, gateway.settle(admission, usage(admission)))
            assert await held(gateway, house) == (0, 0), steps
            if over:
                break
        assert over
        assert await check_books(house, gateway) == (15 * steps, steps)


async def test_what_was_admitted_under_an_old_epoch_is_released_when_the_next_try_fails(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await make_house(database, valkey_url, concurrent_requests=1, tokens_per_day=1000)
    async with house.gateway() as gateway:
        await gateway.release(await gateway.admit(house.request()))

        async def moved(row: LedgerReservation) -> ReservedUnder:
            newer = await set_limits(house, concurrent_requests=2)
            await gateway.publish(house.tenant_id)
            assert newer.policy_epoch is not None
            assert newer.policy_epoch > row.policy_epoch
            return ReservedUnder(Reserved.EPOCH_MOVED, None)

        monkeypatch.setattr(gateway.upkeep.books, "reserve", moved)
        with pytest.raises(PolicyStale):
            await gateway.admit(house.request())
        assert await held(gateway, house) == (0, 0)


async def test_books_that_take_longer_than_a_lease_are_not_waited_for(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then a reaper would have ended the lease in the counters."""
    house = await make_house(database, valkey_url, concurrent_requests=1, tokens_per_day=1000)
    async with house.gateway(replace(SETTINGS, lease_s=0.4)) as gateway:
        await gateway.release(await gateway.admit(house.request()))

        async def slow(row: LedgerReservation) -> ReservedUnder:
            await asyncio.sleep(1.0)
            return ReservedUnder(Reserved.KEPT, row.epoch)

        monkeypatch.setattr(gateway.upkeep.books, "reserve", slow)
        with pytest.raises(DatabaseUnavailable):
            await gateway.admit(house.request())
        assert await held(gateway, house) == (0, 0)
