"""Buckets of counters that live go on into the epoch that follows theirs: nothing is given twice, and little is lost."""

import time
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.tenants.admission.gateways import make_tenant_with_gateways, usage
from tests.tenants.admission.gateways import used as tenant_use
from tests.tenants.counters.limited_tenant import (
    EMPTY,
    POLICY,
    LimitedTenant,
    admit,
    age,
    deny,
    reserved_of,
    usage_of,
    used,
)

from loraplex.tenants.counters.counter_replies import Settled
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.counters.snapshot import CounterSnapshot
from loraplex.tenants.database import Database
from loraplex.tenants.errors import ValkeyUnavailable
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.reservation import Reservation, ReservationRequest

# They give little back in the seconds of a test.
BEGAN = [0.0]
RATES = QuotaLimits(requests_per_minute=60, tokens_per_minute=6000)


@pytest.fixture
async def tenant(counters: Counters) -> LimitedTenant:
    tenant = LimitedTenant(tenant=RATES, key=RATES)
    await counters.rebuild(tenant.tenant_id, 1, EMPTY)
    return tenant


async def rebuild_with(
    counters: Counters, tenant: LimitedTenant, epoch: int, *reservations: Reservation
) -> None:
    read = CounterSnapshot(policy_epoch=POLICY, totals=(), reservations=reservations)
    assert await counters.rebuild(tenant.tenant_id, epoch, read) == epoch


async def taken(counters: Counters, tenant: LimitedTenant, level: str = "tenant") -> tuple[int, int, int]:
    """Requests, paid tokens, and reserved tokens."""
    uses = await used(counters, tenant)
    tokens = uses[level, "tokens_per_minute"]
    return uses[level, "requests_per_minute"].used, tokens.used, tokens.reserved


@pytest.fixture(autouse=True)
def began() -> None:
    BEGAN[0] = time.monotonic()


def near(*expected: int) -> object:
    """Equal but for what has been refilled since the test began: in a second one request and 100 tokens."""
    seconds = 1 + time.monotonic() - BEGAN[0]
    refilled = (seconds, 100 * seconds, 0)
    return tuple(pytest.approx(each, abs=most) for each, most in zip(expected, refilled, strict=True))


async def admit_tokens(
    counters: Counters, tenant: LimitedTenant, tokens: int
) -> tuple[ReservationRequest, Reservation]:
    request = tenant.request(tokens)
    return request, reserved_of(request, await admit(counters, request), 1)


async def test_living_buckets_keep_their_debt_across_a_rebuild(
    counters: Counters, tenant: LimitedTenant
) -> None:
    for _ in range(20):
        request, _ = await admit_tokens(counters, tenant, 100)
        await counters.settle(tenant.tenant_id, request.id, usage_of(100))
    _, reserved = await admit_tokens(counters, tenant, 1000)
    before = await taken(counters, tenant)
    assert before == near(21, 2000, 1000)
    for epoch in (2, 3, 4):
        await rebuild_with(counters, tenant, epoch, reserved)
        for level in ("tenant", "key"):
            assert await taken(counters, tenant, level) == near(*before)
    assert await counters.settle(tenant.tenant_id, reserved.id, usage_of(500)) == Settled(True)
    assert await taken(counters, tenant) == near(21, 2500, 0)


async def test_a_subject_without_a_row_in_the_ledger_keeps_its_bucket(
    counters: Counters, tenant: LimitedTenant
) -> None:
    """All of its requests were given back, so it has neither totals nor anything open."""
    for _ in range(20):
        request, _ = await admit_tokens(counters, tenant, 100)
        await counters.cancel(tenant.tenant_id, request.id)
    await rebuild_with(counters, tenant, 2)
    assert await taken(counters, tenant, "key") == near(20, 0, 0)


async def test_an_untouched_bucket_continues_to_fill(client: Redis, counters: Counters) -> None:
    tenant = LimitedTenant(tenant=RATES)
    await rebuild_with(counters, tenant, 2)
    await age(client, tenant.tenant_id, 30)
    await rebuild_with(counters, tenant, 3)
    assert await taken(counters, tenant) == near(30, 3000, 0)


async def test_an_end_that_is_on_its_way_has_paid_its_bound(
    counters: Counters, tenant: LimitedTenant
) -> None:
    """The snapshot was read after the settlement, so the new counters do not count it."""
    _, reserved = await admit_tokens(counters, tenant, 1000)
    await rebuild_with(counters, tenant, 2)
    assert await taken(counters, tenant) == near(1, 1000, 0)
    assert await counters.settle(tenant.tenant_id, reserved.id, usage_of(900), charge=reserved) == Settled(
        False
    )
    assert await taken(counters, tenant) == near(1, 1000, 0)
    await rebuild_with(counters, tenant, 3)
    assert await taken(counters, tenant) == near(1, 1000, 0)


async def test_a_rebuilt_reservation_that_the_next_snapshot_lacks_has_paid(
    counters: Counters, tenant: LimitedTenant
) -> None:
    _, reserved = await admit_tokens(counters, tenant, 1000)
    await rebuild_with(counters, tenant, 2, reserved)
    await rebuild_with(counters, tenant, 3)
    assert await taken(counters, tenant) == near(1, 1000, 0)


async def test_an_end_between_snapshot_and_rebuild_pays_once(
    counters: Counters, tenant: LimitedTenant
) -> None:
    _, reserved = await admit_tokens(counters, tenant, 1000)
    assert await counters.settle(tenant.tenant_id, reserved.id, usage_of(900)) == Settled(True)
    for epoch in (2, 3):
        await rebuild_with(counters, tenant, epoch, reserved)
        assert await taken(counters, tenant) == near(1, 900, 1000)
    await rebuild_with(counters, tenant, 4)
    assert await taken(counters, tenant) == near(1, 900, 0)


async def test_an_admission_between_snapshot_and_rebuild_is_paid_for(
    counters: Counters, tenant: LimitedTenant
) -> None:
    """The ledger refuses it, and it is admitted again."""
    request, _ = await admit_tokens(counters, tenant, 1000)
    await rebuild_with(counters, tenant, 2)
    assert not (await admit(counters, request)).repeated
    assert await taken(counters, tenant) == near(2, 1000, 1000)


async def test_unpaid_use_is_kept_across_a_rebuild(client: Redis, counters: Counters) -> None:
    other = LimitedTenant()
    await counters.rebuild(other.tenant_id, 1, EMPTY)
    tenant = LimitedTenant(tenant=RATES)
    reserved = reserved_of(tenant.request(1000), await admit(counters, other.request()))
    await rebuild_with(counters, tenant, 2, reserved)
    await age(client, tenant.tenant_id, 60)
    await counters.settle(tenant.tenant_id, reserved.id, usage_of(900))
    await rebuild_with(counters, tenant, 3)
    assert await taken(counters, tenant) == near(0, 900, 0)


@pytest.mark.parametrize("lost", ["all", "forgotten", "an epoch between"])
async def test_buckets_that_may_lack_something_start_empty(
    client: Redis, counters: Counters, tenant: LimitedTenant, lost: str
) -> None:
    """The counters of an epoch in between may have been lost before a late snapshot arrives."""
    if lost == "all":
        await client.flushall()
    if lost == "forgotten":
        assert await counters.invalidate(tenant.tenant_id)
    await rebuild_with(counters, tenant, 3 if lost == "an epoch between" else 2)
    assert await taken(counters, tenant) == near(60, 6000, 0)


async def test_only_the_counters_of_one_epoch_are_forgotten(
    counters: Counters, tenant: LimitedTenant
) -> None:
    assert not await counters.invalidate(tenant.tenant_id, 2)
    await admit(counters, tenant.request())
    assert await counters.invalidate(tenant.tenant_id, 1)
    assert not await counters.invalidate(tenant.tenant_id, 1)


async def test_a_rate_holds_across_rebuilds(client: Redis, counters: Counters) -> None:
    tenant = LimitedTenant(tenant=QuotaLimits(tokens_per_minute=60))
    await counters.rebuild(tenant.tenant_id, 1, EMPTY)
    _, reserved = await admit_tokens(counters, tenant, 60)
    await rebuild_with(counters, tenant, 2, reserved)
    await age(client, tenant.tenant_id, 60)
    await deny(counters, tenant.request(2))
    await counters.settle(tenant.tenant_id, reserved.id, usage_of(60))
    await rebuild_with(counters, tenant, 3)
    await deny(counters, tenant.request(3))
    await age(client, tenant.tenant_id, 30)
    await deny(counters, tenant.request(33))
    await admit(counters, tenant.request(30))


async def test_an_odd_settle_costs_no_minute(
    database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply was lost, and it is repeated when it is unknown whether it was counted: the tenant is rebuilt."""
    tenant, now = await make_tenant_with_gateways(database, valkey_url, requests_per_minute=60), [0.0]
    async with tenant.gateway(clock=lambda: now[0]) as gateway:
        reservation = await gateway.admit(tenant.request())
        counters = gateway.maintenance.counters
        settle, settle_early = counters.settle, counters.settle_early

        async def lose_early(*arguments: Any) -> Settled:
            await settle_early(*arguments)
            raise ValkeyUnavailable("the answer was lost")

        async def fail(*_: Any, **__: Any) -> Settled:
            raise ValkeyUnavailable("away")

        monkeypatch.setattr(counters, "settle_early", lose_early)
        monkeypatch.setattr(counters, "settle", fail)
        await gateway.settle(reservation, usage(reservation))
        await tenant.shipped()
        monkeypatch.setattr(counters, "settle", settle)
        now[0] += 900.0
        await gateway.maintenance.settlements.retry()
        assert await gateway.maintenance.ledger.epoch(tenant.tenant_id) == 2
        assert (await tenant_use(gateway, tenant.tenant_id))["requests_per_minute"].used <= 1
        await gateway.cancel(await gateway.admit(tenant.request()))
