"""Leases: heartbeats, expiry, and what a reaper may end."""

from dataclasses import replace

from redis.asyncio import Redis
from tests.tenants.counters.limited_tenant import (
    EMPTY,
    LimitedTenant,
    admit,
    age,
    deny,
    reserved_of,
    usage_of,
    used,
)

from loraplex.tenants.counters.counter_replies import Heartbeat, Settled
from loraplex.tenants.counters.counters import LEASE_S, Counters
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.valkey import tenant_key

ONE = QuotaLimits(concurrent_requests=1)


async def with_counters(counters: Counters, tenant: LimitedTenant) -> LimitedTenant:
    await counters.rebuild(tenant.tenant_id, 1, EMPTY)
    return tenant


async def test_a_lease_without_heartbeat_ends_and_waits_for_the_reaper(
    client: Redis, counters: Counters
) -> None:
    tenant = await with_counters(counters, LimitedTenant(adapter=ONE))
    dead = tenant.request(tokens=7)
    await admit(counters, dead)
    assert (await deny(counters, tenant.request())).overdue == 0
    assert await counters.expired(tenant.tenant_id) == []
    await age(client, tenant.tenant_id, LEASE_S)
    assert await counters.expired(tenant.tenant_id) == [dead.id]
    assert (await admit(counters, tenant.request(tokens=1))).overdue == 1
    # Its slot is free, but its amounts stay reserved until its use is known.
    assert (await used(counters, tenant))["tenant", "tokens_per_day"].reserved == 8
    assert await counters.reap(tenant.tenant_id, dead.id, usage_of(2)) == Settled(True)
    assert await counters.reap(tenant.tenant_id, dead.id, usage_of(2)) == Settled(False)
    day = (await used(counters, tenant))["tenant", "tokens_per_day"]
    assert (day.used, day.reserved) == (2, 1)
    assert await counters.expired(tenant.tenant_id) == []


async def test_a_heartbeat_keeps_the_lease_and_wins_over_the_reaper(
    client: Redis, counters: Counters
) -> None:
    tenant = await with_counters(counters, LimitedTenant(key=ONE))
    request = tenant.request()
    reserved = reserved_of(request, await admit(counters, request), 1)
    for _ in range(3):
        await age(client, tenant.tenant_id, LEASE_S - 5)
        reply = await counters.heartbeat(tenant.tenant_id, [reserved])
        assert reply == Heartbeat(1, extended=frozenset({request.id}))
    await age(client, tenant.tenant_id, LEASE_S)
    await counters.heartbeat(tenant.tenant_id, [reserved])
    assert await counters.reap(tenant.tenant_id, request.id, usage_of(0)) == Settled(False)
    await deny(counters, tenant.request())


async def test_another_request_does_not_extend_a_lease(client: Redis, counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant())
    silent = tenant.request()
    await admit(counters, silent)
    await age(client, tenant.tenant_id, LEASE_S - 5)
    await admit(counters, tenant.request())
    await age(client, tenant.tenant_id, 6)
    assert await counters.expired(tenant.tenant_id) == [silent.id]


async def test_a_heartbeat_after_the_end_brings_nothing_back(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant())
    request = tenant.request()
    reserved = reserved_of(request, await admit(counters, request), 1)
    await counters.settle(tenant.tenant_id, request.id, usage_of(1))
    assert await counters.heartbeat(tenant.tenant_id, [reserved]) == Heartbeat(
        1, lost=frozenset({request.id})
    )
    assert (await used(counters, tenant))["tenant", "concurrent_requests"].used == 0


async def test_a_heartbeat_recreates_a_lost_reservation(client: Redis, counters: Counters) -> None:
    """As after a restart of Valkey that lost its last second."""
    tenant = await with_counters(counters, LimitedTenant())
    request = tenant.request(tokens=9)
    admitted = await admit(counters, tenant.request(tokens=0))
    mine, foreign, unknown = (
        reserved_of(tenant.request(tokens=9), admitted, epoch) for epoch in (1, 2, None)
    )
    reply = await counters.heartbeat(tenant.tenant_id, [mine, foreign, unknown])
    assert reply.recreated == {mine.id, unknown.id}
    assert reply.lost == {foreign.id}
    day = (await used(counters, tenant))["key", "tokens_per_day"]
    assert (day.used, day.reserved) == (0, 18)
    assert await counters.settle(tenant.tenant_id, mine.id, usage_of(request.tokens)) == Settled(True)


async def test_heartbeats_without_counters_do_nothing(client: Redis, counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant())
    request = tenant.request()
    reserved = reserved_of(request, await admit(counters, request))
    await client.delete(tenant_key(tenant.tenant_id, "state"))
    assert await counters.heartbeat(tenant.tenant_id, [reserved]) == Heartbeat(None)
    assert await counters.settle(tenant.tenant_id, request.id, usage_of(1)) == Settled(False)
    assert await counters.expired(tenant.tenant_id) == []


async def test_use_is_counted_in_the_periods_of_the_ledger(counters: Counters) -> None:
    """The reply to an admission was lost at midnight, and the gateway's clock was ahead when it admitted by its share."""
    tenant = await with_counters(counters, LimitedTenant())
    request = tenant.request(tokens=9)
    admitted = await admit(counters, request)
    reserved = replace(reserved_of(request, admitted, 1), day="d:2000-01-01")
    assert (await counters.settle(tenant.tenant_id, request.id, usage_of(9), charge=reserved)).found
    uses = await used(counters, tenant)
    assert (uses["tenant", "tokens_per_day"].used, uses["tenant", "tokens_per_day"].reserved) == (0, 0)
    assert (uses["tenant", "tokens_per_month"].used, uses["tenant", "tokens_per_month"].reserved) == (9, 0)
