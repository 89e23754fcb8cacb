"""Each step of the epoch protocol, delayed at the place where another step interferes."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from tests.tenants.admission.gateways import (
    TenantWithGateways,
    check_ledger,
    make_tenant_with_gateways,
    open_client,
    snapshot_of,
    usage,
    used,
)

from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.admission.counter_rebuild import CounterRebuild
from loraplex.tenants.database import Database
from loraplex.tenants.errors import PolicyStale
from loraplex.tenants.ledger.statements import NEXT_EPOCH
from loraplex.tenants.ledger.usage_ledger import Fence
from loraplex.tenants.quotas.reservation import Reservation
from loraplex.tenants.valkey import tenant_key


async def rebuild_counters(tenant: TenantWithGateways, gateway: QuotaAdmissionController) -> None:
    """Valkey loses everything, and the next request finds it lost."""
    await tenant.flush()
    await gateway.cancel(await gateway.admit(tenant.request(1, 1)))


async def test_a_reservation_of_counters_that_were_replaced_is_not_kept(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=40)
    journaled: list[Reservation] = []
    async with tenant.gateway() as slow, tenant.gateway() as other:
        await other.cancel(await other.admit(tenant.request(1, 1)))
        await slow.cancel(await slow.admit(tenant.request(1, 1)))
        admit = slow.maintenance.journal.admit

        async def overtaken(reservation: Reservation) -> None:
            if not journaled:
                await rebuild_counters(tenant, other)
            journaled.append(reservation)
            await admit(reservation)

        monkeypatch.setattr(slow.maintenance.journal, "admit", overtaken)
        reservation = await slow.admit(tenant.request())
        assert [each.epoch for each in journaled] == [1, 2] and journaled[1] == reservation
        assert journaled[0].id != reservation.id, "the first one is withdrawn under its own id"
        await tenant.shipped()
        assert (await used(other, tenant.tenant_id))["tokens_per_day"].reserved == 30
        await slow.settle(reservation, usage(reservation))
        assert await check_ledger(tenant, slow) == (15, 1)


async def test_usage_waits_for_a_rebuild_and_belongs_to_its_epoch(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as gateway:
        reservation = await gateway.admit(tenant.request())
        await tenant.shipped()
        fence = await gateway.maintenance.ledger.raise_fence(tenant.tenant_id)
        async with database.as_writer() as rebuilding:
            parameters = {"tenant_id": tenant.tenant_id, "fenced_epoch": fence.fenced_epoch}
            await rebuilding.execute(NEXT_EPOCH, parameters)
            settling = asyncio.ensure_future(
                gateway.maintenance.ledger.settle(reservation, usage(reservation))
            )
            await asyncio.wait({settling}, timeout=0.2)
            assert not settling.done()
            open_then = await rebuilding.scalar(text("SELECT count(*) FROM reservations"))
        assert open_then == 1
        assert (await settling).epoch == 2


async def test_no_epoch_is_taken_before_a_fence(database: Database, valkey_url: str) -> None:
    """But for the first one: no counters exist."""
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as gateway:
        ledger = gateway.maintenance.ledger
        first = await ledger.raise_fence(tenant.tenant_id)
        assert (await snapshot_of(ledger, first))[0] == 1
        assert await ledger.take_snapshot(first) is None
        outdates_nothing = await ledger.raise_fence(tenant.tenant_id, outdates=False)
        assert await ledger.take_snapshot(outdates_nothing) is None
        second = await ledger.raise_fence(tenant.tenant_id)
        assert await ledger.take_snapshot(first) is None, "the second fence may not be confirmed"
        assert (await snapshot_of(ledger, second))[0] == 2
        beyond = await ledger.raise_fence(tenant.tenant_id, above=7)
        assert (await snapshot_of(ledger, beyond))[0] == 8


@pytest.mark.parametrize("epoch", [0, 1])
async def test_a_rebuild_whose_fence_was_overtaken_waits_for_another_one(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    """Another rebuild came between its fence and its snapshot, and the fence behind that one is not confirmed yet."""
    tenant = await make_tenant_with_gateways(database, valkey_url, concurrent_requests=1)
    may_ship, admitted = asyncio.Event(), list[Reservation]()
    async with tenant.gateway() as slow, tenant.gateway() as other, tenant.gateway() as late:
        for _ in range(epoch):
            await other.cancel(await other.admit(tenant.request()))
        reserve, take_snapshot = slow.maintenance.ledger.reserve, late.maintenance.ledger.take_snapshot

        async def wait_and_reserve(*arguments: Any) -> Any:
            await may_ship.wait()
            return await reserve(*arguments)

        async def overtaken(fence: Fence) -> Any:
            if admitted:
                return await take_snapshot(fence)
            await rebuild_counters(tenant, other)
            monkeypatch.setattr(slow.maintenance.ledger, "reserve", wait_and_reserve)
            admitted.append(await slow.admit(tenant.request()))
            await other.maintenance.ledger.raise_fence(tenant.tenant_id)
            try:
                return await take_snapshot(fence)
            finally:
                may_ship.set()

        monkeypatch.setattr(late.maintenance.ledger, "take_snapshot", overtaken)
        assert await late.maintenance.settlements.counter_rebuild.rebuild(tenant.tenant_id) == epoch + 2
        assert (await used(other, tenant.tenant_id))["concurrent_requests"].used == 1
        await slow.settle(admitted[0], usage(admitted[0]))
        assert await check_ledger(tenant, slow) == (15, 1)


async def test_a_snapshot_read_before_the_usage_brings_nothing_back(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, concurrent_requests=1)
    async with tenant.gateway() as gateway, tenant.gateway() as rebuilding:
        reservation = await gateway.admit(tenant.request())
        ledger, counters = rebuilding.maintenance.ledger, rebuilding.maintenance.counters
        fence = await rebuilding.maintenance.fences.raise_fence(tenant.tenant_id)
        epoch, snapshot = await snapshot_of(ledger, fence)
        assert len(snapshot.reservations) == 1
        await gateway.settle(reservation, usage(reservation))
        await tenant.shipped()
        assert await counters.rebuild(tenant.tenant_id, epoch, snapshot) > epoch
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_usage_that_a_rebuild_has_counted_is_not_counted_again(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as slow, tenant.gateway() as other:
        reservation = await slow.admit(tenant.request())
        settle_early = slow.maintenance.counters.settle_early

        async def overtaken(*arguments: Any) -> Any:
            await rebuild_counters(tenant, other)
            return await settle_early(*arguments)

        monkeypatch.setattr(slow.maintenance.counters, "settle_early", overtaken)
        await slow.settle(reservation, usage(reservation))
        assert await check_ledger(tenant, slow) == (15, 1)


async def test_a_policy_whose_publication_was_missed_is_published_by_shipping(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    forgotten: list[UUID] = []
    async with tenant.gateway() as gateway:
        gateway.on_policy_outdated = forgotten.append
        await gateway.cancel(await gateway.admit(tenant.request()))
        await tenant.shipped()
        async with database.as_operator() as session:
            await session.execute(text("UPDATE tenants SET suspended_at = now()"))
        reservation = await gateway.admit(tenant.request())
        await tenant.shipped()
        await asyncio.gather(*gateway._outdated.values())
        assert forgotten == [tenant.tenant_id]
        with pytest.raises(PolicyStale):
            await gateway.admit(tenant.request())
        await gateway.settle(reservation, usage(reservation))
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_a_gateway_that_is_late_for_a_rebuild_does_not_repeat_it(
    database: Database, valkey_url: str
) -> None:
    """It found no counters, and starts a rebuild when the lock of the gateway that rebuilt them has expired."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_minute=100)
    async with tenant.gateway() as gateway, open_client(valkey_url) as client:
        await gateway.cancel(await gateway.admit(tenant.request()))
        await client.delete(tenant_key(tenant.tenant_id, "seeding"))
        maintenance = gateway.maintenance
        late = CounterRebuild(maintenance.ledger, maintenance.counters, maintenance.fences, client, uuid4())
        assert await late.try_rebuild(tenant.tenant_id)
        reservation = await gateway.admit(tenant.request())
        assert reservation.epoch == 1
        await gateway.cancel(reservation)
        await tenant.flush()
        assert await late.try_rebuild(tenant.tenant_id)
        assert await maintenance.ledger.epoch(tenant.tenant_id) == 2
