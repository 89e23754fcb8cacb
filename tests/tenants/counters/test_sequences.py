"""Sequences count as running until their request ends, whatever release counts them."""

from uuid import UUID

import pytest
from redis.asyncio import Redis
from tests.tenants.counters.limited_tenant import (
    LEVELS,
    LimitedTenant,
    admit,
    age,
    decision,
    deny,
    failed,
    keys_of,
    limited,
    reserved_of,
    usage_of,
    used,
    with_counters,
)

from loraplex.tenants.counters.counter_replies import Settled
from loraplex.tenants.counters.counters import LEASE_S, Counters
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.valkey import tenant_key


async def strip_newer_fields(client: Redis, tenant: LimitedTenant, reservation_id: UUID) -> None:
    """Leave of a reservation's record what an older release writes: neither a number of sequences nor limits of requests."""
    open_key = tenant_key(tenant.tenant_id, "1:open")
    record = await client.hget(open_key, str(reservation_id))
    assert isinstance(record, bytes)
    await client.hset(open_key, str(reservation_id), b" ".join(record.split()[:7]).decode())


@pytest.mark.parametrize("level", LEVELS)
async def test_each_sequence_counts_as_running_until_its_request_ends(counters: Counters, level: str) -> None:
    tenant = await with_counters(counters, limited(level, QuotaLimits(concurrent_requests=100)))
    first = tenant.request(sequences=64)
    await admit(counters, first)
    denied = await deny(counters, tenant.request(sequences=37))
    found = decision(denied, level, "concurrent_requests")
    assert (found.used, found.asked, found.retry_after_s) == (64, 37, 1.0)
    await admit(counters, tenant.request(sequences=36))
    assert (await used(counters, tenant))[level, "concurrent_requests"].used == 100
    assert await counters.cancel(tenant.tenant_id, first.id) == Settled(True)
    assert (await used(counters, tenant))[level, "concurrent_requests"].used == 36
    never = await deny(counters, tenant.request(sequences=101))
    assert never.exhausted and never.deciding.retry_after_s is None


async def test_a_heartbeat_recreates_all_sequences_of_a_lost_reservation(
    client: Redis, counters: Counters
) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(concurrent_requests=9)))
    request = tenant.request(sequences=8)
    reserved = reserved_of(request, await admit(counters, request), epoch=1)
    await client.delete(
        *[key for key in await keys_of(client, tenant.tenant_id) if not key.endswith(":state")]
    )
    await admit(counters, tenant.request())
    assert (await counters.heartbeat(tenant.tenant_id, [reserved])).recreated == {request.id}
    assert failed(await counters.reserve(tenant.request())) == [("tenant", "concurrent_requests")]


async def test_sequences_of_expired_leases_do_not_run(client: Redis, counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(concurrent_requests=9)))
    lost = tenant.request(sequences=9)
    await admit(counters, lost)
    await age(client, tenant.tenant_id, LEASE_S)
    await admit(counters, tenant.request(sequences=9))
    assert (await used(counters, tenant))["tenant", "concurrent_requests"].used == 9
    assert await counters.reap(tenant.tenant_id, lost.id, usage_of(0)) == Settled(True)
    assert (await used(counters, tenant))["tenant", "concurrent_requests"].used == 9


async def test_a_reservation_of_an_older_release_ends_without_taking_others_sequences(
    client: Redis, counters: Counters
) -> None:
    """Its record has no number of sequences, and the counters that it left have no sum of them."""
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(concurrent_requests=9)))
    older, newer = tenant.request(sequences=1), tenant.request(sequences=5)
    await admit(counters, older)
    await strip_newer_fields(client, tenant, older.id)
    for key in await keys_of(client, tenant.tenant_id):
        if ":rate:" in key:
            await client.hdel(key, "sequences:1")
    await admit(counters, newer)
    assert await counters.cancel(tenant.tenant_id, older.id) == Settled(True)
    assert (await used(counters, tenant))["tenant", "concurrent_requests"].used == 5


async def test_sequences_that_an_older_release_did_not_subtract_run_no_more(
    client: Redis, counters: Counters
) -> None:
    """While releases are mixed, an older gateway ends requests of a newer one: by their leases, not by the sum of sequences."""
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(concurrent_requests=9)))
    newer, last = tenant.request(sequences=5), tenant.request(sequences=9)
    await admit(counters, newer)
    await strip_newer_fields(client, tenant, newer.id)
    assert await counters.cancel(tenant.tenant_id, newer.id) == Settled(True)
    assert (await used(counters, tenant))["tenant", "concurrent_requests"].used == 0
    await admit(counters, last)
    assert (await used(counters, tenant))["tenant", "concurrent_requests"].used == 9
    assert await counters.cancel(tenant.tenant_id, last.id) == Settled(True)
    assert (await used(counters, tenant))["tenant", "concurrent_requests"].used == 0
