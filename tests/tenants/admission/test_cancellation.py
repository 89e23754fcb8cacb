"""A caller may be cancelled at every await: nothing stays reserved, nothing is lost, nothing is counted twice."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from tests.tenants.admission.gateways import (
    SETTINGS,
    TenantWithGateways,
    check_ledger,
    make_tenant_with_gateways,
    set_limits,
    usage,
    used,
)

from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, PolicyStale
from loraplex.tenants.ledger.usage_ledger import Reserved, ReservedUnder
from loraplex.tenants.quotas.reservation import Reservation

MAX_STEPS = 400


async def left_after(steps: int, work: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Cancel after so many steps of the event loop. Returns whether it had ended, and what it returned nevertheless,
    since Python 3.11 loses a cancellation that meets the end of a wait inside `asyncio.wait_for`."""
    task = asyncio.create_task(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    over = task.done()
    task.cancel()
    await asyncio.wait({task})
    return over, None if task.cancelled() else task.result()


async def reserved_and_running(
    gateway: QuotaAdmissionController, tenant: TenantWithGateways
) -> tuple[int, int]:
    """Running requests and reserved tokens in the counters, after failed steps were repeated."""
    await gateway.maintenance.settlements.retry()
    uses = await used(gateway, tenant.tenant_id)
    return uses["concurrent_requests"].used, uses["tokens_per_day"].reserved


async def test_an_admission_may_be_cancelled_at_every_await(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, concurrent_requests=1, tokens_per_day=1000)
    async with tenant.gateway() as gateway:
        await gateway.cancel(await gateway.admit(tenant.request()))
        for steps in range(1, MAX_STEPS):
            over, reservation = await left_after(steps, gateway.admit(tenant.request()))
            if isinstance(reservation, Reservation):
                await gateway.cancel(reservation)
            assert await reserved_and_running(gateway, tenant) == (0, 0), steps
            if over:
                break
        assert over
        await tenant.rows("DELETE FROM reservations")
        assert await check_ledger(tenant, gateway) == (0, 0)


async def test_a_settle_may_be_cancelled_at_every_await(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(
        database, valkey_url, concurrent_requests=1, tokens_per_day=100_000
    )
    async with tenant.gateway() as gateway:
        for steps in range(1, MAX_STEPS):
            reservation = await gateway.admit(tenant.request())
            over, _ = await left_after(steps, gateway.settle(reservation, usage(reservation)))
            assert await reserved_and_running(gateway, tenant) == (0, 0), steps
            if over:
                break
        assert over
        assert await check_ledger(tenant, gateway) == (15 * steps, steps)


async def test_a_reservation_of_an_old_epoch_is_cancelled_when_the_next_try_fails(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, concurrent_requests=1, tokens_per_day=1000)
    async with tenant.gateway() as gateway:
        await gateway.cancel(await gateway.admit(tenant.request()))

        async def moved(reservation: Reservation, *_: Any) -> ReservedUnder:
            newer = await set_limits(tenant, concurrent_requests=2)
            await gateway.publish(tenant.tenant_id)
            assert newer.policy_epoch is not None
            assert newer.policy_epoch > reservation.request.policy_epoch
            return ReservedUnder(Reserved.EPOCH_MOVED, None)

        monkeypatch.setattr(gateway.maintenance.ledger, "reserve", moved)
        with pytest.raises(PolicyStale):
            await gateway.admit(tenant.request())
        assert await reserved_and_running(gateway, tenant) == (0, 0)


async def test_an_admission_does_not_wait_longer_than_a_lease_for_the_ledger(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then a reaper would have ended the lease in the counters."""
    tenant = await make_tenant_with_gateways(database, valkey_url, concurrent_requests=1, tokens_per_day=1000)
    async with tenant.gateway(replace(SETTINGS, lease_s=1.0)) as gateway:
        await gateway.cancel(await gateway.admit(tenant.request()))

        async def slow(reservation: Reservation, *_: Any) -> ReservedUnder:
            await asyncio.sleep(60)
            return ReservedUnder(Reserved.KEPT, reservation.epoch)

        monkeypatch.setattr(gateway.maintenance.ledger, "reserve", slow)
        with pytest.raises(DatabaseUnavailable):
            await gateway.admit(tenant.request())
        assert await reserved_and_running(gateway, tenant) == (0, 0)
