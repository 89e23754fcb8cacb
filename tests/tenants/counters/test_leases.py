"""Leases: heartbeats, what expires, and what a reaper may take back."""

from dataclasses import replace

from redis.asyncio import Redis
from tests.tenants.counters.counting import EMPTY, Customer, admit, age, deny, hold_of, used

from loraplex.tenants.counters.counter_replies import Heartbeat, Settled
from loraplex.tenants.counters.counters import LEASE_S, Counters
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.reservation import ActualUsage
from loraplex.tenants.valkey import tenant_key

ONE = QuotaLimits(concurrent_requests=1)


async def seeded(counters: Counters, customer: Customer) -> Customer:
    await counters.seed(customer.tenant_id, 1, EMPTY)
    return customer


async def test_a_lease_without_heartbeat_ends_and_waits_for_the_reaper(
    client: Redis, counters: Counters
) -> None:
    customer = await seeded(counters, Customer(adapter=ONE))
    dead = customer.request(tokens=7)
    await admit(counters, dead)
    assert (await deny(counters, customer.request())).overdue == 0
    assert await counters.expired(customer.tenant_id) == []
    await age(client, customer.tenant_id, LEASE_S)
    assert await counters.expired(customer.tenant_id) == [dead.id]
    assert (await admit(counters, customer.request(tokens=1))).overdue == 1
    # Its slot is free, but what it may have used is not, until somebody knows.
    assert (await used(counters, customer))["tenant", "tokens_per_day"].reserved == 8
    assert await counters.reap(customer.tenant_id, dead.id, ActualUsage(2, 0)) == Settled(True)
    assert await counters.reap(customer.tenant_id, dead.id, ActualUsage(2, 0)) == Settled(False)
    day = (await used(counters, customer))["tenant", "tokens_per_day"]
    assert (day.used, day.reserved) == (2, 1)
    assert await counters.expired(customer.tenant_id) == []


async def test_a_heartbeat_keeps_the_lease_and_wins_over_the_reaper(
    client: Redis, counters: Counters
) -> None:
    customer = await seeded(counters, Customer(key=ONE))
    request = customer.request()
    hold = hold_of(request, await admit(counters, request), 1)
    for _ in range(3):
        await age(client, customer.tenant_id, LEASE_S - 5)
        answer = await counters.heartbeat(customer.tenant_id, [hold])
        assert answer == Heartbeat(1, extended=frozenset({request.id}))
    await age(client, customer.tenant_id, LEASE_S)
    await counters.heartbeat(customer.tenant_id, [hold])
    assert await counters.reap(customer.tenant_id, request.id, ActualUsage(0, 0)) == Settled(False)
    await deny(counters, customer.request())


async def test_another_request_does_not_extend_a_lease(client: Redis, counters: Counters) -> None:
    customer = await seeded(counters, Customer())
    silent = customer.request()
    await admit(counters, silent)
    await age(client, customer.tenant_id, LEASE_S - 5)
    await admit(counters, customer.request())
    await age(client, customer.tenant_id, 6)
    assert await counters.expired(customer.tenant_id) == [silent.id]


async def test_a_heartbeat_after_the_end_brings_nothing_back(counters: Counters) -> None:
    customer = await seeded(counters, Customer())
    request = customer.request()
    hold = hold_of(request, await admit(counters, request), 1)
    await counters.settle(customer.tenant_id, request.id, ActualUsage(1, 0))
    assert await counters.heartbeat(customer.tenant_id, [hold]) == Heartbeat(1, lost=frozenset({request.id}))
    assert (await used(counters, customer))["tenant", "concurrent_requests"].used == 0


async def test_a_heartbeat_makes_a_lost_reservation_anew(client: Redis, counters: Counters) -> None:
    """As after a restart of Valkey that lost its last second."""
    customer = await seeded(counters, Customer())
    request = customer.request(tokens=9)
    admitted = await admit(counters, customer.request(tokens=0))
    mine, foreign, unknown = (hold_of(customer.request(tokens=9), admitted, epoch) for epoch in (1, 2, None))
    answer = await counters.heartbeat(customer.tenant_id, [mine, foreign, unknown])
    assert answer.recreated == {mine.id, unknown.id}
    assert answer.lost == {foreign.id}
    day = (await used(counters, customer))["key", "tokens_per_day"]
    assert (day.used, day.reserved) == (0, 18)
    assert await counters.settle(customer.tenant_id, mine.id, ActualUsage(request.tokens, 0)) == Settled(True)


async def test_heartbeats_without_counters_do_nothing(client: Redis, counters: Counters) -> None:
    customer = await seeded(counters, Customer())
    request = customer.request()
    hold = hold_of(request, await admit(counters, request))
    await client.delete(tenant_key(customer.tenant_id, "state"))
    assert await counters.heartbeat(customer.tenant_id, [hold]) == Heartbeat(None)
    assert await counters.settle(customer.tenant_id, request.id, ActualUsage(1, 0)) == Settled(False)
    assert await counters.expired(customer.tenant_id) == []


async def test_use_is_counted_in_the_periods_that_the_books_have(counters: Counters) -> None:
    """The answer to an admission was lost at midnight, and the gateway's clock was ahead when it admitted by itself."""
    customer = await seeded(counters, Customer())
    request = customer.request(tokens=9)
    admitted = await admit(counters, request)
    hold = replace(hold_of(request, admitted, 1), day="d:2000-01-01")
    assert (await counters.settle(customer.tenant_id, request.id, ActualUsage(9, 0), charge=hold)).found
    uses = await used(counters, customer)
    assert (uses["tenant", "tokens_per_day"].used, uses["tenant", "tokens_per_day"].reserved) == (0, 0)
    assert (uses["tenant", "tokens_per_month"].used, uses["tenant", "tokens_per_month"].reserved) == (9, 0)
