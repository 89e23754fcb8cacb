"""A caller may be cancelled at every await: nothing stays reserved, nothing is lost, nothing is counted twice."""

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from tests.tenants.admission.gateways import (
    SETTINGS,
    TenantWithGateways,
    all_shipped,
    check_ledger,
    make_tenant_with_gateways,
    set_limits,
    usage,
    used,
)

from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, PolicyStale
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
    await all_shipped(gateway)
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

        admit = gateway.maintenance.journal.admit

        async def overtaken(reservation: Reservation) -> None:
            newer = await set_limits(tenant, concurrent_requests=2)
            await gateway.publish(tenant.tenant_id)
            assert newer.policy_epoch is not None
            assert newer.policy_epoch > reservation.request.policy_epoch
            await gateway.maintenance.fences.raise_fence(tenant.tenant_id)
            await admit(reservation)

        monkeypatch.setattr(gateway.maintenance.journal, "admit", overtaken)
        with pytest.raises(PolicyStale):
            await gateway.admit(tenant.request())
        assert await reserved_and_running(gateway, tenant) == (0, 0)


async def test_an_admission_without_counters_does_not_wait_longer_than_a_lease_for_the_ledger(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then a reaper would have ended the lease in the counters."""
    tenant = await make_tenant_with_gateways(database, valkey_url, concurrent_requests=1, tokens_per_day=1000)
    async with tenant.gateway(replace(SETTINGS, lease_s=1.0)) as gateway:
        await gateway.cancel(await gateway.admit(tenant.request()))

        async def slow(*_: Any) -> int:
            await asyncio.sleep(60)
            return 1

        monkeypatch.setattr(gateway.maintenance.ledger, "reserve_without_counters", slow)
        for _ in range(3):
            gateway.maintenance.breaker.failed(math.inf)
        newer = await set_limits(tenant, tokens_per_day=None)
        with pytest.raises(DatabaseUnavailable):
            await gateway.admit(tenant.request(key=newer))
        gateway.maintenance.breaker.close()
        assert await reserved_and_running(gateway, tenant) == (0, 0)
