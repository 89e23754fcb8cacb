"""Usage is never lost and never counted twice: lost replies, an unreachable ledger, gateways taken for dead."""

import asyncio
import contextlib
import math
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from tests.tenants.admission.gateways import (
    PRICE,
    SETTINGS,
    check_ledger,
    closed,
    closed_later,
    make_tenant_with_gateways,
    open_client,
    read_only,
    snapshot_of,
    usage,
    used,
)
from tests.tenants.admission.memory_journal import MemoryJournal
from tests.tenants.counters.limited_tenant import age

from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.tenants.counters.counter_replies import Settled
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    DatabaseUnavailable,
    JournalFull,
    JournalUnavailable,
    RateLimited,
    ValkeyUnavailable,
)
from loraplex.tenants.ledger.journal.records import OpenRequest
from loraplex.tenants.ledger.usage_ledger import LedgerWrite
from loraplex.tenants.quotas.limits import NO_LIMITS, Subject
from loraplex.tenants.quotas.reservation import NOTHING_USED, Reservation, ReservationRequest, SettledUsage


async def away(*_: object, **__: object) -> Settled:
    raise ValkeyUnavailable("away")


async def test_requests_are_admitted_and_end_while_the_ledger_is_unreachable(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=135)
    async with tenant.gateway() as gateway:
        admissions = [await gateway.admit(tenant.request()) for _ in range(3)]
        async with closed(embedded_services, database):
            for reservation in admissions:
                await gateway.settle(reservation, usage(reservation))
            admissions += [await gateway.admit(tenant.request()) for _ in range(3)]
            with pytest.raises(RateLimited, match="tokens_per_day"):
                await gateway.admit(tenant.request())
            for reservation in admissions[3:5]:
                await gateway.settle(reservation, usage(reservation))
            await gateway.maintenance.retry()
            assert len(gateway.maintenance.requests.early) == 5
            assert not gateway.maintenance.requests.unsettled
        await gateway.settle(admissions[0], usage(admissions[0]))
        await gateway.cancel(admissions[5])
        assert await check_ledger(tenant, gateway) == (75, 5)
        assert not gateway.maintenance.requests.early


async def test_nothing_is_admitted_while_the_journal_is_full(database: Database, valkey_url: str) -> None:
    """Full before the counters are asked, or only when the reservation is to be written."""
    tenant, journal = await make_tenant_with_gateways(database, valkey_url), MemoryJournal()
    async with tenant.gateway(journal=journal) as gateway:
        running = await gateway.admit(tenant.request())
        journal.full = True
        with pytest.raises(JournalFull):
            await gateway.admit(tenant.request())
        await gateway.settle(running, usage(running))
        admit = gateway.maintenance.counters.reserve

        async def fill_up(request: ReservationRequest, wait_s: float | None = None) -> Any:
            reply = await admit(request, wait_s)
            journal.full = True
            return reply

        journal.full = False
        gateway.maintenance.counters.reserve = fill_up  # type: ignore[method-assign]
        with pytest.raises(JournalFull):
            await gateway.admit(tenant.request())
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_an_end_that_the_journal_could_not_write_is_written_later(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, journal = await make_tenant_with_gateways(database, valkey_url), MemoryJournal()
    async with tenant.gateway(journal=journal) as gateway:
        reservation = await gateway.admit(tenant.request())
        end = journal.end

        async def fail(*_: Any) -> None:
            raise JournalUnavailable("the disk fails")

        monkeypatch.setattr(journal, "end", fail)
        with pytest.raises(JournalUnavailable):
            await gateway.settle(reservation, usage(reservation))
        with pytest.raises(JournalUnavailable):
            await gateway.maintenance.retry()
        await tenant.shipped()
        assert [each.id for each in gateway.maintenance.requests.leased()] == [reservation.id]
        monkeypatch.setattr(journal, "end", end)
        await gateway.maintenance.retry()
        assert await check_ledger(tenant, gateway) == (15, 1)


@pytest.mark.parametrize("shipped", [False, True])
async def test_an_end_that_the_journal_has_in_spite_of_its_error_counts_once(
    shipped: bool, database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may fail after it has written: the journal then finds the end when it opens the file again."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    journal = MemoryJournal()
    async with tenant.gateway(journal=journal) as gateway:
        reservation = await gateway.admit(tenant.request())
        end = journal.end

        async def write_and_fail(reservation_id: UUID, used: SettledUsage) -> bool:
            await end(reservation_id, used)
            raise JournalUnavailable("the disk fails")

        monkeypatch.setattr(journal, "end", write_and_fail)
        with pytest.raises(JournalUnavailable):
            await gateway.settle(reservation, usage(reservation))
        monkeypatch.setattr(journal, "end", end)
        if shipped:
            await tenant.shipped()
        await gateway.maintenance.retry()
        assert await check_ledger(tenant, gateway) == (15, 1)
        assert gateway.maintenance.requests.leased() == []


async def test_usage_that_postgresql_rejects_stops_no_other(database: Database, valkey_url: str) -> None:
    tenant, journal = (
        await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000),
        MemoryJournal(),
    )
    async with tenant.gateway(journal=journal) as gateway:
        reservations = [await gateway.admit(tenant.request()) for _ in range(3)]
        await tenant.shipped()
        for reservation in reservations:
            broken = replace(journal.open_now[reservation.id].reservation, day="no day")
            if reservation is reservations[1]:
                journal.open_now[reservation.id] = OpenRequest(broken, NOTHING_USED)
            await gateway.settle(reservation, usage(reservation))
        await tenant.shipped()
        assert [each.reservation.id for each in journal.rejected] == [reservations[1].id]
        assert gateway.maintenance.shipping.rejected == 1
        assert len(await tenant.rows("SELECT 1 FROM usage_records")) == 2
        assert gateway.maintenance.requests.to_rebuild == {tenant.tenant_id}, "they counted it early"
        await gateway.maintenance.retry()
        assert (await used(gateway, tenant.tenant_id))["tokens_per_day"].used == 30


async def test_the_counters_know_an_end_at_once(
    embedded_services: EmbeddedServices, database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, concurrent_requests=1)
    async with tenant.gateway() as gateway, closed_later(embedded_services, database) as close:
        await gateway.cancel(await gateway.admit(tenant.request()))
        await close()
        for _ in range(3):
            reservation = await gateway.admit(tenant.request())
            await gateway.settle(reservation, usage(reservation))
        uses = await used(gateway, tenant.tenant_id, [Subject("tenant", tenant.tenant_id, NO_LIMITS)])
        assert (uses["tokens_per_day"].used, uses["tokens_per_day"].reserved) == (45, 0)


async def test_an_update_in_progress_is_not_sent_again(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maintenance runs while an update is in progress: a second one would find nothing and rebuild the tenant."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_minute=1000)
    async with tenant.gateway() as gateway:
        reservation = await gateway.admit(tenant.request())
        settle, updates = gateway.maintenance.counters.settle, []
        retried = asyncio.Event()

        async def slow(*arguments: Any, **more: Any) -> Any:
            updates.append(arguments)
            await retried.wait()
            return await settle(*arguments, **more)

        monkeypatch.setattr(gateway.maintenance.counters, "settle_early", away)
        monkeypatch.setattr(gateway.maintenance.counters, "settle", slow)
        await gateway.settle(reservation, usage(reservation))
        await gateway.maintenance.shipping.ship()
        async with asyncio.timeout(60):
            while not updates:
                await asyncio.sleep(0.001)
            await gateway.maintenance.settlements.retry()
        retried.set()
        await tenant.shipped()
        assert len(updates) == 1 and not gateway.maintenance.requests.pending_counter_updates
        assert await gateway.maintenance.ledger.epoch(tenant.tenant_id) == 1


@pytest.mark.parametrize("counted_early", [True, False])
async def test_a_lost_reply_of_the_ledger_counts_once(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch, counted_early: bool
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as gateway, tenant.gateway() as other:
        reservation = await gateway.admit(tenant.request())
        await tenant.shipped()
        ledger, settle = gateway.maintenance.ledger, gateway.maintenance.ledger.settle

        async def lose(reservation: Reservation, usage: SettledUsage) -> LedgerWrite:
            await settle(reservation, usage)
            raise DatabaseUnavailable("the answer was lost")

        if not counted_early:
            monkeypatch.setattr(gateway.maintenance.counters, "settle_early", away)
        monkeypatch.setattr(ledger, "settle", lose)
        await gateway.settle(reservation, usage(reservation))
        with pytest.raises(DatabaseUnavailable):
            await gateway.maintenance.shipping.ship()
        monkeypatch.setattr(ledger, "settle", settle)
        await tenant.flush()
        await other.cancel(await other.admit(tenant.request()))
        await gateway.maintenance.retry()
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_a_gateway_that_was_given_up_but_lives_is_charged_in_full(
    database: Database, valkey_url: str
) -> None:
    tenant, now = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000), [0.0]
    async with tenant.gateway() as silent, tenant.gateway(clock=lambda: now[0]) as other:
        reservation = await silent.admit(tenant.request())
        await tenant.shipped()
        await other.cancel(await other.admit(tenant.request()))
        await other.maintenance.heartbeat()
        now[0] += SETTINGS.lease_s
        await tenant.let_leases_run_out()
        assert await other.maintenance.reaper.reap() == 1
        assert (await used(other, tenant.tenant_id))["tokens_per_day"].reserved == 0
        assert await tenant.rows("SELECT outcome FROM usage_records") == []
        await silent.maintenance.heartbeat()
        assert (await used(other, tenant.tenant_id))["tokens_per_day"].reserved == 0
        await silent.settle(reservation, usage(reservation))
        assert await check_ledger(tenant, silent) == (15, 1)
        assert await tenant.rows("SELECT outcome FROM usage_records") == [{"outcome": "completed"}]


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
        await tenant.shipped()
        used_up = SettledUsage(outcome="completed", prompt_tokens=10).priced(PRICE)
        assert (await dead.maintenance.ledger.settle(reservation, used_up)).written
        dead.maintenance.requests.running.clear()
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
            with pytest.raises(DatabaseUnavailable):
                await gateway.maintenance.ledger.raise_fence(tenant.tenant_id)
            await gateway.settle(reservation, usage(reservation))
            for _ in range(2):
                with pytest.raises(DatabaseUnavailable):
                    await gateway.maintenance.shipping.ship()
            assert [*gateway.maintenance.requests.early] == [reservation.id]
        for broken in (gateway.maintenance.ledger.known([]), gateway.maintenance.shipping.ship()):
            with contextlib.suppress(DatabaseUnavailable):
                await broken
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_pending_updates_are_sent_while_other_usage_is_written(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy gateway some usage is always being written to the ledger."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as gateway:
        missed, busy = [await gateway.admit(tenant.request()) for _ in range(2)]
        for _ in range(3):
            gateway.maintenance.breaker.failed(math.inf)
        await gateway.settle(missed, usage(missed))
        await tenant.shipped()
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
        monkeypatch.setattr(gateway.maintenance.counters, "settle_early", away)
        await gateway.settle(busy, usage(busy))
        await gateway.maintenance.settlements.retry()
        assert (await used(gateway, tenant.tenant_id))["tokens_per_day"].used == 15
        goes_on.set()
        assert await check_ledger(tenant, gateway) == (30, 2)


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
        monkeypatch.setattr(counters, "settle_early", away)
        await gateway.settle(reservation, usage(reservation))
        await tenant.shipped()
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
        fence = await rebuilding.maintenance.fences.raise_fence(tenant.tenant_id)
        epoch, snapshot = await snapshot_of(rebuilding.maintenance.ledger, fence)
        for _ in range(3):
            gateway.maintenance.breaker.failed(math.inf)
        reservation = await gateway.admit(tenant.request())
        assert reservation.degraded
        gateway.maintenance.breaker.close()
        await gateway.settle(reservation, usage(reservation))
        await tenant.shipped()
        await rebuilding.maintenance.counters.rebuild(tenant.tenant_id, epoch, snapshot)
        assert await check_ledger(tenant, gateway) == (15, 1)
