"""The server's clock goes back: by a little, the tenant's time stands; by more, its counters are rebuilt under the right time."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from redis.asyncio import Redis
from tests.tenants.counters.limited_tenant import (
    EMPTY,
    POLICY,
    LimitedTenant,
    admit,
    deny,
    failed,
    reserved_of,
    usage_of,
    used,
)
from tests.tenants.counters.server_clock import set_server_clock

from loraplex.tenants.counters.counter_replies import CountersMissing, Heartbeat, Settled
from loraplex.tenants.counters.counters import LEASE_S, Counters
from loraplex.tenants.counters.snapshot import CounterSnapshot, PeriodTotal
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.valkey import tenant_key

NOON: Final = datetime(2027, 3, 5, 12, tzinfo=UTC)
HOUR: Final = timedelta(hours=1)
MOST: Final = timedelta(seconds=60)
MICROSECOND: Final = timedelta(microseconds=1)
RATES: Final = QuotaLimits(requests_per_minute=6, tokens_per_minute=600, tokens_per_day=900)


async def tenant_at(counters: Counters, moment: datetime, limits: QuotaLimits = RATES) -> LimitedTenant:
    tenant = LimitedTenant(limits)
    set_server_clock(counters, moment)
    assert await counters.rebuild(tenant.tenant_id, 1, EMPTY) == 1
    return tenant


async def test_the_time_stands_while_the_clock_is_a_little_behind(counters: Counters) -> None:
    tenant = await tenant_at(counters, NOON)
    for _ in range(6):
        await admit(counters, tenant.request())
    for behind in (MICROSECOND, MOST / 2, MOST):
        set_server_clock(counters, NOON - behind)
        assert (await deny(counters, tenant.request())).at == NOON
    set_server_clock(counters, NOON + MOST / 6)
    assert (await admit(counters, tenant.request())).at == NOON + MOST / 6


async def test_counters_of_a_clock_that_was_ahead_are_missing(counters: Counters, client: Redis) -> None:
    tenant = await tenant_at(counters, NOON + HOUR)
    request = tenant.request()
    reserved = reserved_of(request, await admit(counters, request), 1)
    set_server_clock(counters, NOON)
    assert await counters.reserve(tenant.request()) == CountersMissing()
    assert await counters.read(tenant.tenant_id, tenant.subjects) is None
    assert await counters.settled(tenant.tenant_id) is None
    assert await counters.heartbeat(tenant.tenant_id, [reserved]) == Heartbeat(None)
    settled = await counters.settle(tenant.tenant_id, request.id, usage_of(1), charge=reserved)
    assert settled == Settled(False) and settled.epoch == 0
    assert await client.hget(tenant_key(tenant.tenant_id, "state"), "policy") == b"%d" % POLICY


async def test_buckets_refill_a_minute_after_the_rebuild(counters: Counters) -> None:
    """Not an hour later. They begin empty, so nothing is given twice; what is used and open is the ledger's."""
    tenant = await tenant_at(counters, NOON + HOUR)
    open_request = tenant.request(tokens=30)
    reserved = reserved_of(open_request, await admit(counters, open_request), 1)
    set_server_clock(counters, NOON)
    total = PeriodTotal("tenant", tenant.tenant_id, "d:2027-03-05", 70, 0)
    snapshot = CounterSnapshot(policy_epoch=POLICY, totals=(total,), reservations=(reserved,))
    assert await counters.rebuild(tenant.tenant_id, 2, snapshot) == 2
    denied = await deny(counters, tenant.request())
    assert denied.at == NOON
    assert failed(denied) == [("tenant", "requests_per_minute"), ("tenant", "tokens_per_minute")]
    assert denied.deciding.retry_after_s is not None and denied.deciding.retry_after_s <= 60
    set_server_clock(counters, NOON + MOST)
    for _ in range(6):
        await admit(counters, tenant.request(tokens=1))
    await deny(counters, tenant.request(tokens=1))
    day = (await used(counters, tenant))["tenant", "tokens_per_day"]
    assert (day.used, day.reserved) == (70, 36)


async def test_leases_of_a_clock_that_was_ahead_run_out(counters: Counters) -> None:
    tenant = await tenant_at(counters, NOON + HOUR, QuotaLimits(concurrent_requests=1))
    dead = tenant.request()
    reserved = reserved_of(dead, await admit(counters, dead), 1)
    set_server_clock(counters, NOON)
    snapshot = CounterSnapshot(policy_epoch=POLICY, totals=(), reservations=(reserved,))
    assert await counters.rebuild(tenant.tenant_id, 2, snapshot) == 2
    await deny(counters, tenant.request())
    set_server_clock(counters, NOON + timedelta(seconds=LEASE_S))
    assert (await admit(counters, tenant.request())).overdue == 1
    assert await counters.expired(tenant.tenant_id) == [dead.id]


@pytest.mark.parametrize("step", ["settle", "charge", "remember", "heartbeat"])
async def test_every_step_that_stores_a_time_is_noticed(counters: Counters, step: str) -> None:
    """Else a bucket that only paid while the clock was ahead would stand for an hour."""
    tenant = await tenant_at(counters, NOON)
    tenant_id, request, unknown = tenant.tenant_id, tenant.request(), tenant.request()
    admitted = await admit(counters, request)
    reserved, foreign = (reserved_of(each, admitted, 1) for each in (request, unknown))
    steps: dict[str, Callable[[], Awaitable[Any]]] = {
        "settle": lambda: counters.settle(tenant_id, request.id, usage_of(1)),
        "charge": lambda: counters.settle(tenant_id, unknown.id, usage_of(1), charge=foreign),
        "remember": lambda: counters.cancel(tenant_id, unknown.id),
        "heartbeat": lambda: counters.heartbeat(tenant_id, [reserved]),
    }
    set_server_clock(counters, NOON + HOUR)
    await steps[step]()
    set_server_clock(counters, NOON)
    assert await counters.reserve(tenant.request()) == CountersMissing()
