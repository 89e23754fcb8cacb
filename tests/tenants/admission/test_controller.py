"""A request is admitted by counters and ledger together, and settled once."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from sqlalchemy import text
from tests.tenants.admission.gateways import (
    all_shipped,
    check_ledger,
    make_tenant_with_gateways,
    set_limits,
    usage,
    used,
)
from tests.tenants.admission.memory_journal import MemoryJournal

from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS
from loraplex.tenants.admission.recording import NONE, AdmissionRecorder
from loraplex.tenants.database import Database
from loraplex.tenants.errors import PolicyStale, QuotaExhausted, RateLimited, ValkeyUnavailable
from loraplex.tenants.quotas.reservation import RequestTimings, Reservation


@dataclass
class Recorder(AdmissionRecorder):
    """Records the decisions, and the tokens of settled requests."""

    decisions: list[tuple[str, str]] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)

    def decided(self, decision: str, seconds: float, limit: str = NONE, level: str = NONE) -> None:
        self.decisions.append((decision, limit))

    def settled(self, reserved: int, used: int, seconds: float) -> None:
        self.tokens.append((reserved, used))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("postgres_major", POSTGRES_MAJORS, indirect=True)
async def test_a_request_is_reserved_and_settled_once(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, requests_per_minute=60, tokens_per_day=100)
    async with tenant.gateway() as gateway:
        reservation = await gateway.admit(tenant.request(prompt=10, completion=20))
        assert reservation.rate.requests is not None
        assert (reservation.rate.requests.limit, reservation.rate.requests.remaining) == (60, 59)
        assert (await used(gateway, tenant.tenant_id))["tokens_per_day"].reserved == 30
        await tenant.shipped()
        assert len(await tenant.rows("SELECT id FROM reservations")) == 1
        await asyncio.gather(*(gateway.settle(reservation, usage(reservation)) for _ in range(3)))
        await gateway.cancel(reservation)
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_what_a_request_met_of_its_limits_is_kept_with_its_phases(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, requests_per_minute=60, tokens_per_day=100)
    async with tenant.gateway() as gateway:
        first, second = [await gateway.admit(tenant.request(prompt=10, completion=20)) for _ in range(2)]
        timings = RequestTimings(phases={"decode": (0, 5)})
        await gateway.settle(second, replace(usage(second), timings=timings))
        await gateway.cancel(first)
        await tenant.shipped()
        (row,) = await tenant.rows("SELECT limits FROM request_phases")
    day = ["tenant", "tokens_per_day", 100, 0, 30, 30]
    assert row["limits"] == {"degraded": False, "met": [["tenant", "requests_per_minute", 60, 1, 0, 1], day]}


async def test_every_decision_and_settlement_is_recorded(database: Database, valkey_url: str) -> None:
    tenant, recorder = (
        await make_tenant_with_gateways(database, valkey_url, requests_per_minute=1),
        Recorder(),
    )
    async with tenant.gateway(recorder=recorder) as gateway:
        reservation = await gateway.admit(tenant.request(prompt=10, completion=20))
        await gateway.settle(reservation, usage(reservation))
        with pytest.raises(RateLimited):
            await gateway.admit(tenant.request())
        assert gateway.recent_refusal(tenant.key, "again") is not None
        with pytest.raises(PolicyStale):
            await gateway.admit(replace(tenant.request(), policy_epoch=0))
    limited = ("rate_limited", "requests_per_minute")
    assert recorder.decisions == [("admitted", NONE), limited, limited, ("stale", NONE)]
    assert recorder.tokens == [(30, 15)]


async def test_sequences_survive_lost_counters(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, concurrent_requests=70)
    async with tenant.gateway() as gateway:
        running = await gateway.admit(replace(tenant.request(), sequences=64))
        await tenant.flush()
        with pytest.raises(RateLimited) as refused:
            await gateway.admit(replace(tenant.request(), sequences=7))
        assert (refused.value.limit, refused.value.level) == ("concurrent_requests", "tenant")
        others = await gateway.admit(replace(tenant.request(), sequences=6))
        assert (await used(gateway, tenant.tenant_id))["concurrent_requests"].used == 70
        await gateway.settle(running, usage(running))
        assert (await used(gateway, tenant.tenant_id))["concurrent_requests"].used == 6
        await gateway.cancel(others)
        with pytest.raises(QuotaExhausted, match="concurrent_requests of the tenant is 70"):
            await gateway.admit(replace(tenant.request(), sequences=71))


async def test_what_is_refused_is_refused_again_until_the_bucket_can_have_a_request(
    database: Database, valkey_url: str
) -> None:
    tenant, clock = await make_tenant_with_gateways(database, valkey_url, requests_per_minute=2), Clock()
    async with tenant.gateway(clock=clock) as gateway:
        for _ in range(2):
            await gateway.cancel(await gateway.admit(tenant.request()))
        assert gateway.recent_refusal(tenant.key, "early") is None
        with pytest.raises(RateLimited) as refused:
            await gateway.admit(tenant.request())
        assert refused.value.retry_after_s is not None and refused.value.rate is not None
        clock.now += 0.5
        repeated = gateway.recent_refusal(tenant.key, "late")
        assert repeated is not None and (type(repeated), str(repeated)) == (RateLimited, str(refused.value))
        assert repeated.retry_after_s == pytest.approx(refused.value.retry_after_s - 0.5)
        explanation = await gateway.explain(tenant.tenant_id, "late")
        assert explanation is not None and not explanation.degraded
        raised = await set_limits(tenant, requests_per_minute=100)
        assert gateway.recent_refusal(tenant.key, "unpublished") is not None
        assert gateway.recent_refusal(raised, "published") is None


async def test_work_may_start_after_the_counters_and_before_the_journal(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, journal = (
        await make_tenant_with_gateways(database, valkey_url, requests_per_minute=2),
        MemoryJournal(),
    )
    async with tenant.gateway(journal=journal) as gateway:
        await gateway.cancel(await gateway.admit(tenant.request()))
        on_provisional: list[str] = []
        admit, goes_on = journal.admit, asyncio.Event()

        async def slow(reservation: Reservation) -> None:
            await goes_on.wait()
            await admit(reservation)

        monkeypatch.setattr(journal, "admit", slow)
        admitting = asyncio.create_task(gateway.admit(tenant.request(), lambda: on_provisional.append("")))
        async with asyncio.timeout(60):
            while not on_provisional:
                await asyncio.sleep(0.001)
        assert not admitting.done()
        goes_on.set()
        await gateway.settle(reservation := await admitting, usage(reservation))
        with pytest.raises(RateLimited):
            await gateway.admit(tenant.request(), lambda: pytest.fail("denied, and let in"))
        stale = replace(tenant.request(), policy_epoch=0)
        with pytest.raises(PolicyStale):
            await gateway.admit(stale, lambda: pytest.fail("stale, and let in"))


async def test_a_cancelled_reservation_leaves_no_use(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=30)
    async with tenant.gateway() as gateway:
        await gateway.cancel(await gateway.admit(tenant.request()))
        await gateway.cancel(await gateway.admit(tenant.request()))
        assert await check_ledger(tenant, gateway) == (0, 0)


async def test_refusals_name_the_limit(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(
        database, valkey_url, concurrent_requests=1, tokens_per_day=40, requests_per_minute=10
    )
    async with tenant.gateway() as gateway:
        reservation = await gateway.admit(tenant.request())
        with pytest.raises(RateLimited) as refused:
            await gateway.admit(tenant.request(5, 5))
        assert (refused.value.limit, refused.value.level) == ("concurrent_requests", "tenant")
        rate = refused.value.rate
        assert rate is not None and rate.requests is not None and rate.requests.limit == 10
        await gateway.settle(reservation, usage(reservation))
        with pytest.raises(QuotaExhausted) as exhausted:
            await gateway.admit(request := tenant.request())
        assert (exhausted.value.limit, exhausted.value.limit_value) == ("tokens_per_day", 40)
        explanation = await gateway.explain(tenant.tenant_id, request.request_id)
        assert explanation is not None
        assert [decision.name for decision in explanation.decisions if not decision.passed] == [
            "tokens_per_day"
        ]


@pytest.mark.parametrize("published", [True, False])
async def test_a_changed_limit_is_in_force_for_the_next_request(
    database: Database, valkey_url: str, published: bool
) -> None:
    """If its publication was missed: from the moment that a request of the outdated policy is shipped."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=1000)
    async with tenant.gateway() as first, tenant.gateway() as second:
        await second.cancel(await second.admit(tenant.request()))
        newer = await set_limits(tenant, tokens_per_day=20)
        if published:
            await first.publish(tenant.tenant_id)
        else:
            await second.cancel(await second.admit(tenant.request()))
            late = await second.admit(tenant.request())
            await all_shipped(second)
            await asyncio.gather(*second._outdated.values())
            await second.cancel(late)
        with pytest.raises(PolicyStale):
            await second.admit(tenant.request())
        with pytest.raises(QuotaExhausted):
            await second.admit(tenant.request(key=newer))
        assert await check_ledger(tenant, second) == (0, 0)


async def test_a_published_policy_is_known_to_gateways_that_cannot_read_it(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url)
    epoch = tenant.key.policy_epoch or 0
    async with tenant.gateway() as first, tenant.gateway() as second:
        # Also before the tenant has counters.
        await second.require_policy(tenant.tenant_id, epoch)
        await set_limits(tenant, tokens_per_day=20)
        await second.require_policy(tenant.tenant_id, epoch)
        await first.publish(tenant.tenant_id)
        with pytest.raises(PolicyStale):
            await second.require_policy(tenant.tenant_id, epoch)
        await second.require_policy(tenant.tenant_id, epoch + 1)
        second.maintenance.breaker.is_open = True
        with pytest.raises(ValkeyUnavailable):
            await second.require_policy(tenant.tenant_id, epoch + 1)


async def test_lost_counters_are_rebuilt_from_the_ledger(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=100, concurrent_requests=2)
    async with tenant.gateway() as first, tenant.gateway() as second:
        done, running = [await first.admit(tenant.request()) for _ in range(2)]
        await first.settle(done, usage(done))
        await tenant.flush()
        lasting = await second.admit(tenant.request())
        uses = await used(second, tenant.tenant_id)
        assert (uses["tokens_per_day"].used, uses["tokens_per_day"].reserved) == (15, 60)
        with pytest.raises(RateLimited):
            await first.admit(tenant.request(1, 1))
        await first.settle(running, usage(running))
        await second.settle(lasting, usage(lasting))
        assert await check_ledger(tenant, first) == (45, 3)


async def test_a_ledger_restored_from_a_backup_catches_up_with_the_counters(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=100)
    async with tenant.gateway() as gateway:
        for _ in range(4):
            await tenant.flush()
            await gateway.cancel(await gateway.admit(tenant.request()))
        async with database.as_operator() as session:
            await session.execute(text("DELETE FROM admission_epochs"))
        reservation = await gateway.admit(tenant.request())
        await gateway.settle(reservation, usage(reservation))
        await tenant.shipped()
        await gateway.maintenance.retry()
        assert await check_ledger(tenant, gateway) == (15, 1)
        last = await gateway.admit(tenant.request())
        assert (reservation.epoch, last.epoch) == (4, 5)
        await gateway.cancel(last)
