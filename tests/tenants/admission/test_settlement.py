"""Usage is never lost and never counted twice: lost replies, an unreachable ledger, gateways taken for dead."""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
from tests.tenants.admission.gateways import (
    PRICE,
    SETTINGS,
    check_ledger,
    closed,
    make_tenant_with_gateways,
    open_client,
    read_only,
    usage,
    used,
)
from tests.tenants.counters.limited_tenant import age

from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.tenants.counters.counter_replies import Settled
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, ValkeyUnavailable
from loraplex.tenants.ledger.usage_ledger import LedgerWrite
from loraplex.tenants.quotas.reservation import Reservation, SettledUsage


async def test_usage_waits_for_an_unreachable_ledger(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as gateway:
        admissions = [await gateway.admit(tenant.request()) for _ in range(3)]
        async with closed(embedded_services, database):
            for reservation in admissions:
                await gateway.settle(reservation, usage(reservation))
            with pytest.raises(DatabaseUnavailable):
                await gateway.admit(tenant.request())
            await gateway.maintenance.settlements.retry()
            assert len(gateway.maintenance.requests.unsettled) == 3
        await gateway.settle(admissions[0], usage(admissions[0]))
        await gateway.maintenance.settlements.retry()
        assert await check_ledger(tenant, gateway) == (45, 3)


async def test_nothing_is_admitted_while_too_much_usage_waits(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway(replace(SETTINGS, max_pending_settlements=1)) as gateway:
        reservation = await gateway.admit(tenant.request())
        async with closed(embedded_services, database):
            await gateway.settle(reservation, usage(reservation))
            with pytest.raises(DatabaseUnavailable, match="too much usage"):
                await gateway.admit(tenant.request())


async def test_an_update_in_progress_is_not_sent_again(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maintenance runs while a settle is in progress: a second one would find nothing and rebuild the tenant."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_minute=1000)
    async with tenant.gateway() as gateway:
        reservation = await gateway.admit(tenant.request())
        settle, updates = gateway.maintenance.counters.settle, []
        retried = asyncio.Event()

        async def slow(*arguments: Any, **more: Any) -> Any:
            updates.append(arguments)
            await retried.wait()
            return await settle(*arguments, **more)

        monkeypatch.setattr(gateway.maintenance.counters, "settle", slow)
        settling = asyncio.create_task(gateway.settle(reservation, usage(reservation)))
        while not updates:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(60):
            await gateway.maintenance.settlements.retry()
        retried.set()
        await settling
        assert len(updates) == 1 and not gateway.maintenance.requests.pending_counter_updates
        assert await gateway.maintenance.ledger.epoch(tenant.tenant_id) == 1


async def test_a_lost_reply_of_the_ledger_counts_once(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as gateway, tenant.gateway() as other:
        reservation = await gateway.admit(tenant.request())
        ledger, settle = gateway.maintenance.ledger, gateway.maintenance.ledger.settle

        async def lose(reservation: Reservation, usage: SettledUsage) -> LedgerWrite:
            await settle(reservation, usage)
            raise DatabaseUnavailable("the answer was lost")

        monkeypatch.setattr(ledger, "settle", lose)
        await gateway.settle(reservation, usage(reservation))
        monkeypatch.setattr(ledger, "settle", settle)
        await tenant.flush()
        await other.cancel(await other.admit(tenant.request()))
        await gateway.maintenance.settlements.retry()
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_a_gateway_that_was_given_up_but_lives_is_charged_in_full(
    database: Database, valkey_url: str
) -> None:
    tenant, now = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000), [0.0]
    async with tenant.gateway() as silent, tenant.gateway(clock=lambda: now[0]) as other:
        reservation = await silent.admit(tenant.request())
        await other.cancel(await other.admit(tenant.request()))
        await other.maintenance.heartbeat()
        now[0] += SETTINGS.lease_s
        await tenant.let_leases_run_out()
        assert await other.maintenance.reaper.reap() == 1
        assert (await used(other, tenant.tenant_id))["tokens_per_day"].reserved == 0
        await silent.settle(reservation, usage(reservation))
        assert await check_ledger(tenant, silent) == (15, 2)
        outcomes = await tenant.rows("SELECT outcome FROM usage_records ORDER BY outcome")
        assert [row["outcome"] for row in outcomes] == ["completed", "unknown"]


async def test_a_gateway_that_was_suspended_reaps_no_running_request(
    database: Database, valkey_url: str
) -> None:
    """As when a whole machine sleeps: all leases on it run out together."""
    tenant, now = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000), [0.0]
    async with tenant.gateway() as asleep, tenant.gateway(clock=lambda: now[0]) as other:
        reservation = await asleep.admit(tenant.request())
        for _ in range(5):
            await other.maintenance.heartbeat()
            now[0] += 10.0
        now[0] += 10 * SETTINGS.lease_s
        await tenant.let_leases_run_out()
        assert await other.maintenance.reaper.reap() == 0
        await other.maintenance.heartbeat()
        assert await other.maintenance.reaper.reap() == 0
        await asleep.maintenance.heartbeat()
        now[0] += SETTINGS.lease_s
        assert await other.maintenance.reaper.reap() == 0
        await asleep.settle(reservation, usage(reservation))
        assert await check_ledger(tenant, other) == (15, 1)


async def test_a_gateway_that_died_between_ledger_and_counters(database: Database, valkey_url: str) -> None:
    tenant, now = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000), [0.0]
    async with tenant.gateway() as dead, tenant.gateway(clock=lambda: now[0]) as other:
        await other.cancel(await other.admit(tenant.request()))
        reservation = await dead.admit(tenant.request())
        used_up = SettledUsage(outcome="completed", prompt_tokens=10).priced(PRICE)
        assert (await dead.maintenance.ledger.settle(reservation, used_up)).written
        assert (await used(other, tenant.tenant_id))["tokens_per_day"].reserved == 30
        await other.maintenance.heartbeat()
        now[0] += SETTINGS.lease_s
        await tenant.let_leases_run_out()
        await other.cancel(await other.admit(tenant.request()))
        assert await other.maintenance.reaper.reap() == 0
        assert await check_ledger(tenant, other) == (10, 1)


async def test_leases_in_valkey_are_renewed_while_the_ledger_is_unreachable(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, concurrent_requests=1)
    async with tenant.gateway() as gateway:
        reservation = await gateway.admit(tenant.request())
        await tenant.let_leases_run_out()
        async with closed(embedded_services, database):
            with pytest.raises(DatabaseUnavailable):
                await gateway.maintenance.heartbeat()
        assert (await used(gateway, tenant.tenant_id))["concurrent_requests"].used == 1
        await gateway.cancel(reservation)


async def test_usage_waits_for_a_read_only_ledger(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as gateway:
        reservation = await gateway.admit(tenant.request())
        async with read_only(embedded_services, database):
            for _ in range(2):
                with pytest.raises(DatabaseUnavailable):
                    await gateway.admit(tenant.request())
            with pytest.raises(DatabaseUnavailable):
                await gateway.maintenance.ledger.take_snapshot(tenant.tenant_id)
            await gateway.settle(reservation, usage(reservation))
            assert len(gateway.maintenance.requests.unsettled) == 1
        with contextlib.suppress(DatabaseUnavailable):
            await gateway.maintenance.ledger.known([])
        for _ in range(2):
            await gateway.maintenance.settlements.retry()
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_pending_updates_are_sent_while_other_usage_is_written(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy gateway some usage is always being written to the ledger."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as gateway:
        missed, busy = [await gateway.admit(tenant.request()) for _ in range(2)]
        for _ in range(3):
            gateway.maintenance.breaker.failed()
        await gateway.settle(missed, usage(missed))
        gateway.maintenance.breaker.close()
        ledger, settle, goes_on = (
            gateway.maintenance.ledger,
            gateway.maintenance.ledger.settle,
            asyncio.Event(),
        )

        async def slow(reservation: Reservation, usage: SettledUsage) -> LedgerWrite:
            await goes_on.wait()
            return await settle(reservation, usage)

        monkeypatch.setattr(ledger, "settle", slow)
        writing = asyncio.create_task(gateway.settle(busy, usage(busy)))
        await asyncio.sleep(0)
        await gateway.maintenance.settlements.retry()
        assert (await used(gateway, tenant.tenant_id))["tokens_per_day"].used == 15
        goes_on.set()
        await writing
        assert await check_ledger(tenant, gateway) == (30, 2)


async def test_a_late_settle_that_is_cancelled_is_counted_later(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was given up has two updates; the caller is cancelled after the first."""
    tenant, now = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000), [0.0]
    async with tenant.gateway() as silent, tenant.gateway(clock=lambda: now[0]) as other:
        reservation = await silent.admit(tenant.request())
        await other.cancel(await other.admit(tenant.request()))
        await other.maintenance.heartbeat()
        now[0] += SETTINGS.lease_s
        await tenant.let_leases_run_out()
        assert await other.maintenance.reaper.reap() == 1
        counters, settle = silent.maintenance.counters, silent.maintenance.counters.settle

        async def leave(*_: object, **__: object) -> Settled:
            raise asyncio.CancelledError

        monkeypatch.setattr(counters, "settle", leave)
        with pytest.raises(asyncio.CancelledError):
            await silent.settle(reservation, usage(reservation))
        monkeypatch.setattr(counters, "settle", settle)
        await silent.maintenance.settlements.retry()
        assert await check_ledger(tenant, silent) == (15, 2)


async def test_a_charge_that_is_repeated_too_late_is_not_counted_twice(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply was lost, and Valkey was unreachable for longer than the counters remember an end."""
    tenant, now = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000), [0.0]
    async with tenant.gateway(clock=lambda: now[0]) as gateway, open_client(valkey_url) as client:
        reservation = await gateway.admit(tenant.request())
        counters, settle = gateway.maintenance.counters, gateway.maintenance.counters.settle

        async def lose(*arguments: Any, **more: Any) -> Settled:
            await settle(*arguments, **more)
            raise ValkeyUnavailable("the answer was lost")

        monkeypatch.setattr(counters, "settle", lose)
        await gateway.settle(reservation, usage(reservation))
        monkeypatch.setattr(counters, "settle", settle)
        now[0] += 900.0
        await age(client, tenant.tenant_id, 900.0)
        await gateway.maintenance.settlements.retry()
        assert await check_ledger(tenant, gateway) == (15, 1)


@pytest.mark.parametrize("admitted_before", [False, True])
async def test_a_rebuild_in_progress_that_misses_a_request_without_counters(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch, admitted_before: bool
) -> None:
    """It read the ledger before the request was reserved, and arrives after it was settled."""
    tenant = await make_tenant_with_gateways(database, valkey_url)
    async with tenant.gateway() as rebuilding, tenant.gateway() as gateway:
        await gateway.cancel(await gateway.admit(tenant.request()))
        if not admitted_before:
            await tenant.flush()
        epoch, snapshot = await rebuilding.maintenance.ledger.take_snapshot(tenant.tenant_id)
        for _ in range(3):
            gateway.maintenance.breaker.failed()
        reservation = await gateway.admit(tenant.request())
        assert reservation.degraded
        gateway.maintenance.breaker.close()
        await gateway.settle(reservation, usage(reservation))
        await rebuilding.maintenance.counters.rebuild(tenant.tenant_id, epoch, snapshot)
        assert await check_ledger(tenant, gateway) == (15, 1)
