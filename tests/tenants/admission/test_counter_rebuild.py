"""Counters made anew from what PostgreSQL knows."""

from uuid import uuid4

import pytest
from redis.asyncio import Redis
from tests.tenants.counters.counting import (
    EMPTY,
    POLICY,
    Customer,
    admit,
    age,
    decision,
    deny,
    failed,
    hold_of,
    used,
)

from loraplex.tenants.counters.counter_replies import CountersMissing, Settled
from loraplex.tenants.counters.counters import LEASE_S, Counters
from loraplex.tenants.counters.snapshot import CounterSnapshot, PeriodTotal
from loraplex.tenants.quotas.limits import MAX_INTEGER, QuotaLimits
from loraplex.tenants.quotas.reservation import ActualUsage, ReservedAmounts


async def todays_hold(counters: Counters, customer: Customer, tokens: int) -> ReservedAmounts:
    """An open reservation of now, which no counter knows."""
    other = Customer()
    await counters.seed(other.tenant_id, 1, EMPTY)
    return hold_of(customer.request(tokens), await admit(counters, other.request()))


async def test_totals_and_open_reservations_count(counters: Counters) -> None:
    customer = Customer(key=QuotaLimits(tokens_per_day=100), adapter=QuotaLimits(concurrent_requests=1))
    hold = await todays_hold(counters, customer, 40)
    totals = (
        PeriodTotal("key", customer.key_id, hold.day, 50, 3),
        PeriodTotal("key", customer.key_id, hold.month, MAX_INTEGER * 5, 3),
        PeriodTotal("key", customer.key_id, "d:2020-01-01", 1000, 3),
        PeriodTotal("tenant", customer.tenant_id, hold.day, 70, 3),
    )
    await counters.seed(
        customer.tenant_id, 4, CounterSnapshot(policy_epoch=POLICY, totals=totals, holds=(hold,))
    )
    denied = await deny(counters, customer.request(tokens=11))
    assert failed(denied) == [("key", "tokens_per_day"), ("adapter", "concurrent_requests")]
    found = decision(denied, "key", "tokens_per_day")
    assert (found.used, found.reserved) == (50, 40)
    assert await counters.settle(customer.tenant_id, hold.id, ActualUsage(1, 0)) == Settled(True)
    uses = await used(counters, customer)
    assert uses["key", "tokens_per_day"].used == 51
    assert uses["key", "tokens_per_month"].used == MAX_INTEGER * 5 + 1
    assert uses["tenant", "tokens_per_day"].used == 71
    assert (await admit(counters, customer.request(tokens=49))).epoch == 4


async def test_a_seeded_reservation_has_a_lease(client: Redis, counters: Counters) -> None:
    customer = Customer()
    hold = await todays_hold(counters, customer, 40)
    await counters.seed(customer.tenant_id, 4, CounterSnapshot(policy_epoch=POLICY, totals=(), holds=(hold,)))
    assert await counters.expired(customer.tenant_id) == []
    await age(client, customer.tenant_id, LEASE_S)
    assert await counters.expired(customer.tenant_id) == [hold.id]


async def test_only_a_later_epoch_replaces_the_counters(counters: Counters) -> None:
    customer = Customer()
    hold = await todays_hold(counters, customer, 40)
    full = CounterSnapshot(policy_epoch=POLICY, totals=(), holds=(hold,))
    assert await counters.seed(customer.tenant_id, 4, full) == 4
    for epoch in (3, 4):
        assert await counters.seed(customer.tenant_id, epoch, full) == 4
    assert (await used(counters, customer))["key", "tokens_per_day"].reserved == 40
    assert await counters.seed(customer.tenant_id, 5, EMPTY) == 5
    assert (await used(counters, customer))["key", "tokens_per_day"].reserved == 0


async def test_forgotten_counters_are_seeded_by_a_later_epoch_only(counters: Counters) -> None:
    customer = Customer()
    total = PeriodTotal("tenant", customer.tenant_id, (await todays_hold(counters, customer, 0)).day, 9, 9)
    seed = CounterSnapshot(policy_epoch=POLICY, totals=(total,), holds=())
    await counters.seed(customer.tenant_id, 4, seed)
    await counters.invalidate(customer.tenant_id)
    await counters.invalidate(customer.tenant_id)
    assert await counters.admit(customer.request()) == CountersMissing()
    assert await counters.seed(customer.tenant_id, 4, seed) == 0
    assert await counters.admit(customer.request()) == CountersMissing()
    assert await counters.seed(customer.tenant_id, 5, seed) == 5
    assert (await used(counters, customer))["tenant", "tokens_per_day"].used == 9


async def test_buckets_start_empty_and_fill(client: Redis, counters: Counters) -> None:
    customer = Customer(tenant=QuotaLimits(requests_per_minute=60, tokens_per_minute=6000))
    await counters.seed(customer.tenant_id, 2, CounterSnapshot(policy_epoch=POLICY, totals=(), holds=()))
    denied = await deny(counters, customer.request(tokens=1500))
    assert failed(denied) == [("tenant", "requests_per_minute"), ("tenant", "tokens_per_minute")]
    assert decision(denied, "tenant", "tokens_per_minute").retry_after_s == pytest.approx(15, abs=1)
    await age(client, customer.tenant_id, 15)
    await admit(counters, customer.request(tokens=1500))
    await deny(counters, customer.request(tokens=1500))


async def test_a_seeded_reservation_pays_for_its_tokens(client: Redis, counters: Counters) -> None:
    """Between the seeding and the next admission nobody knows how large the bucket is."""
    customer = Customer(tenant=QuotaLimits(tokens_per_minute=60))
    hold = await todays_hold(counters, customer, 60)
    await counters.seed(customer.tenant_id, 2, CounterSnapshot(policy_epoch=POLICY, totals=(), holds=(hold,)))
    await age(client, customer.tenant_id, 60)
    assert await counters.settle(customer.tenant_id, hold.id, ActualUsage(50, 0)) == Settled(True)
    assert (await used(counters, customer))["tenant", "tokens_per_minute"].used == 50
    await deny(counters, customer.request(tokens=12))
    await age(client, customer.tenant_id, 10)
    assert (await used(counters, customer))["tenant", "tokens_per_minute"].used == 40
    await admit(counters, customer.request(tokens=10))
    await age(client, customer.tenant_id, 20)
    assert (await used(counters, customer))["tenant", "tokens_per_minute"].used == 20
    await deny(counters, customer.request(tokens=32))
    await admit(counters, customer.request(tokens=30))


async def test_many_reservations_are_seeded_in_one_step(counters: Counters) -> None:
    customer = Customer()
    hold = await todays_hold(counters, customer, 1)
    holds = tuple(
        ReservedAmounts(
            id=uuid4(),
            api_key_id=customer.key_id,
            adapter_id=None,
            tokens=1,
            amount_nano=1,
            day=hold.day,
            month=hold.month,
        )
        for _ in range(2000)
    )
    await counters.seed(customer.tenant_id, 1, CounterSnapshot(policy_epoch=POLICY, totals=(), holds=holds))
    assert (await used(counters, customer))["tenant", "concurrent_requests"].used == 2000
