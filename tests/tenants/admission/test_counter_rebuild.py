"""Counters rebuilt from what PostgreSQL knows."""

from dataclasses import replace

import pytest
from redis.asyncio import Redis
from tests.tenants.counters.limited_tenant import (
    EMPTY,
    POLICY,
    LimitedTenant,
    admit,
    age,
    decision,
    deny,
    failed,
    reserved_of,
    usage_of,
    used,
)

from loraplex.tenants.counters.counter_replies import CountersMissing, Settled
from loraplex.tenants.counters.counters import LEASE_S, Counters
from loraplex.tenants.counters.snapshot import CounterSnapshot, PeriodTotal
from loraplex.tenants.quotas.limits import MAX_INTEGER, QuotaLimits
from loraplex.tenants.quotas.reservation import Reservation


async def todays_reservation(counters: Counters, tenant: LimitedTenant, tokens: int) -> Reservation:
    """A current open reservation that no counter has."""
    other = LimitedTenant()
    await counters.rebuild(other.tenant_id, 1, EMPTY)
    return reserved_of(tenant.request(tokens), await admit(counters, other.request()))


async def test_totals_and_open_reservations_count(counters: Counters) -> None:
    tenant = LimitedTenant(key=QuotaLimits(tokens_per_day=100), adapter=QuotaLimits(concurrent_requests=1))
    reserved = await todays_reservation(counters, tenant, 40)
    totals = (
        PeriodTotal("key", tenant.key_id, reserved.day, 50, 3),
        PeriodTotal("key", tenant.key_id, reserved.month, MAX_INTEGER * 5, 3),
        PeriodTotal("key", tenant.key_id, "d:2020-01-01", 1000, 3),
        PeriodTotal("tenant", tenant.tenant_id, reserved.day, 70, 3),
    )
    await counters.rebuild(
        tenant.tenant_id, 4, CounterSnapshot(policy_epoch=POLICY, totals=totals, reservations=(reserved,))
    )
    denied = await deny(counters, tenant.request(tokens=11))
    assert failed(denied) == [("key", "tokens_per_day"), ("adapter", "concurrent_requests")]
    found = decision(denied, "key", "tokens_per_day")
    assert (found.used, found.reserved) == (50, 40)
    assert await counters.settle(tenant.tenant_id, reserved.id, usage_of(1)) == Settled(True)
    uses = await used(counters, tenant)
    assert uses["key", "tokens_per_day"].used == 51
    assert uses["key", "tokens_per_month"].used == MAX_INTEGER * 5 + 1
    assert uses["tenant", "tokens_per_day"].used == 71
    assert (await admit(counters, tenant.request(tokens=49))).epoch == 4


async def test_a_rebuilt_reservation_has_a_lease(client: Redis, counters: Counters) -> None:
    tenant = LimitedTenant()
    reserved = await todays_reservation(counters, tenant, 40)
    await counters.rebuild(
        tenant.tenant_id, 4, CounterSnapshot(policy_epoch=POLICY, totals=(), reservations=(reserved,))
    )
    assert await counters.expired(tenant.tenant_id) == []
    await age(client, tenant.tenant_id, LEASE_S)
    assert await counters.expired(tenant.tenant_id) == [reserved.id]


async def test_only_a_later_epoch_replaces_the_counters(counters: Counters) -> None:
    tenant = LimitedTenant()
    reserved = await todays_reservation(counters, tenant, 40)
    full = CounterSnapshot(policy_epoch=POLICY, totals=(), reservations=(reserved,))
    assert await counters.rebuild(tenant.tenant_id, 4, full) == 4
    for epoch in (3, 4):
        assert await counters.rebuild(tenant.tenant_id, epoch, full) == 4
    assert (await used(counters, tenant))["key", "tokens_per_day"].reserved == 40
    assert await counters.rebuild(tenant.tenant_id, 5, EMPTY) == 5
    assert (await used(counters, tenant))["key", "tokens_per_day"].reserved == 0


async def test_invalidated_counters_are_rebuilt_by_a_later_epoch_only(counters: Counters) -> None:
    tenant = LimitedTenant()
    total = PeriodTotal("tenant", tenant.tenant_id, (await todays_reservation(counters, tenant, 0)).day, 9, 9)
    snapshot = CounterSnapshot(policy_epoch=POLICY, totals=(total,), reservations=())
    await counters.rebuild(tenant.tenant_id, 4, snapshot)
    await counters.invalidate(tenant.tenant_id)
    await counters.invalidate(tenant.tenant_id)
    assert await counters.reserve(tenant.request()) == CountersMissing()
    assert await counters.rebuild(tenant.tenant_id, 4, snapshot) == 0
    assert await counters.reserve(tenant.request()) == CountersMissing()
    assert await counters.rebuild(tenant.tenant_id, 5, snapshot) == 5
    assert (await used(counters, tenant))["tenant", "tokens_per_day"].used == 9


async def test_buckets_start_empty_and_fill(client: Redis, counters: Counters) -> None:
    tenant = LimitedTenant(tenant=QuotaLimits(requests_per_minute=60, tokens_per_minute=6000))
    await counters.rebuild(
        tenant.tenant_id, 2, CounterSnapshot(policy_epoch=POLICY, totals=(), reservations=())
    )
    denied = await deny(counters, tenant.request(tokens=1500))
    assert failed(denied) == [("tenant", "requests_per_minute"), ("tenant", "tokens_per_minute")]
    assert decision(denied, "tenant", "tokens_per_minute").retry_after_s == pytest.approx(15, abs=1)
    await age(client, tenant.tenant_id, 15)
    await admit(counters, tenant.request(tokens=1500))
    await deny(counters, tenant.request(tokens=1500))


async def test_a_rebuilt_reservation_pays_for_its_tokens(client: Redis, counters: Counters) -> None:
    """Between the rebuild and the next admission the size of the bucket is unknown."""
    tenant = LimitedTenant(tenant=QuotaLimits(tokens_per_minute=60))
    reserved = await todays_reservation(counters, tenant, 60)
    await counters.rebuild(
        tenant.tenant_id, 2, CounterSnapshot(policy_epoch=POLICY, totals=(), reservations=(reserved,))
    )
    await age(client, tenant.tenant_id, 60)
    assert await counters.settle(tenant.tenant_id, reserved.id, usage_of(50)) == Settled(True)
    assert (await used(counters, tenant))["tenant", "tokens_per_minute"].used == 50
    await deny(counters, tenant.request(tokens=12))
    await age(client, tenant.tenant_id, 10)
    assert (await used(counters, tenant))["tenant", "tokens_per_minute"].used == 40
    await admit(counters, tenant.request(tokens=10))
    await age(client, tenant.tenant_id, 20)
    assert (await used(counters, tenant))["tenant", "tokens_per_minute"].used == 20
    await deny(counters, tenant.request(tokens=32))
    await admit(counters, tenant.request(tokens=30))


async def test_many_reservations_are_rebuilt_in_one_step(counters: Counters) -> None:
    tenant = LimitedTenant()
    reserved = await todays_reservation(counters, tenant, 1)
    reservations = tuple(replace(reserved, request=tenant.request(1, 1, base=True)) for _ in range(2000))
    await counters.rebuild(
        tenant.tenant_id, 1, CounterSnapshot(policy_epoch=POLICY, totals=(), reservations=reservations)
    )
    assert (await used(counters, tenant))["tenant", "concurrent_requests"].used == 2000
