"""Buckets of the rate limits: refills, late settlements and changed limits."""

from redis.asyncio import Redis
from tests.tenants.counters.limited_tenant import (
    LimitedTenant,
    admit,
    age,
    deny,
    failed,
    reserved_of,
    usage_of,
    with_counters,
)

from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.reservation import REFUSED


async def test_a_bucket_refills_as_it_says(client: Redis, counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(requests_per_minute=6)))
    for _ in range(6):
        await admit(counters, tenant.request())
    denied = await deny(counters, tenant.request())
    wait = denied.deciding.retry_after_s
    assert wait is not None
    assert 9 < wait <= 10
    await age(client, tenant.tenant_id, wait - 1)
    await deny(counters, tenant.request())
    await age(client, tenant.tenant_id, 1)
    await admit(counters, tenant.request())
    await deny(counters, tenant.request())
    await age(client, tenant.tenant_id, 3600)
    for _ in range(6):
        await admit(counters, tenant.request())
    await deny(counters, tenant.request())


async def test_a_refused_request_is_given_back_at_every_level_once(counters: Counters) -> None:
    each = QuotaLimits(requests_per_minute=2, tokens_per_minute=20, tokens_per_day=20, concurrent_requests=2)
    tenant = await with_counters(counters, LimitedTenant(each, each, each))
    kept, refused = tenant.request(), tenant.request()
    await admit(counters, kept)
    admitted = await admit(counters, refused)
    await deny(counters, tenant.request())
    for _ in range(2):
        await counters.settle_early(reserved_of(refused, admitted, 1), REFUSED)
    await admit(counters, tenant.request())
    assert ("tenant", "requests_per_minute") in failed(await deny(counters, tenant.request()))


async def test_one_that_its_client_gave_up_is_not_given_back(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(requests_per_minute=1)))
    request = tenant.request()
    await admit(counters, request)
    await counters.cancel(tenant.tenant_id, request.id)
    await deny(counters, tenant.request())


async def test_what_has_flowed_back_is_not_given_back_again(client: Redis, counters: Counters) -> None:
    """Else requests that are held and then refused would make room for more than the limit at once."""
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(requests_per_minute=6)))
    held = [tenant.request() for _ in range(6)]
    for request in held:
        await admit(counters, request)
    await age(client, tenant.tenant_id, 30)
    for _ in range(3):
        await admit(counters, tenant.request())
    for request in held:
        await counters.settle(tenant.tenant_id, request.id, REFUSED)
    await deny(counters, tenant.request())


async def test_half_of_it_has_flowed_back(client: Redis, counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(requests_per_minute=1)))
    request = tenant.request()
    await admit(counters, request)
    await age(client, tenant.tenant_id, 30)
    await counters.settle(tenant.tenant_id, request.id, REFUSED)
    await admit(counters, tenant.request())
    await deny(counters, tenant.request())


async def test_a_limit_that_the_admission_did_not_meet_gives_nothing_back(counters: Counters) -> None:
    limited = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(requests_per_minute=1)))
    free = LimitedTenant(tenant_id=limited.tenant_id)
    before = free.request()
    await admit(counters, before)
    await admit(counters, limited.request())
    await counters.settle(limited.tenant_id, before.id, REFUSED)
    await deny(counters, limited.request())


async def test_a_late_settle_gives_no_token_twice(client: Redis, counters: Counters) -> None:
    """Tokens that the bucket regained while a request ran must not be returned again when it ends unused."""
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(tokens_per_minute=60)))
    unused, whole = tenant.request(tokens=60), tenant.request(tokens=60)
    await admit(counters, unused)
    await age(client, tenant.tenant_id, 60)
    await deny(counters, whole)
    await counters.settle(tenant.tenant_id, unused.id, usage_of(0))
    await admit(counters, whole)
    await counters.settle(tenant.tenant_id, whole.id, usage_of(60))
    await deny(counters, tenant.request(tokens=2))
    await age(client, tenant.tenant_id, 30)
    await deny(counters, tenant.request(tokens=32))
    await admit(counters, tenant.request(tokens=30))


async def test_a_lowered_limit_applies_at_once(counters: Counters) -> None:
    tenant = await with_counters(
        counters, LimitedTenant(tenant=QuotaLimits(requests_per_minute=100, tokens_per_day=100))
    )
    for _ in range(5):
        await admit(counters, tenant.request())
    lowered = QuotaLimits(requests_per_minute=3, tokens_per_day=20)
    reply = await deny(counters, LimitedTenant(lowered, tenant_id=tenant.tenant_id).request())
    assert failed(reply) == [("tenant", "requests_per_minute"), ("tenant", "tokens_per_day")]
    assert [each.remaining for each in reply.decisions] == [0, 0]


async def test_a_bucket_of_a_lowered_limit_is_empty_and_no_emptier(client: Redis, counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(requests_per_minute=100)))
    for _ in range(9):
        await admit(counters, tenant.request())
    lowered = LimitedTenant(QuotaLimits(requests_per_minute=3), tenant_id=tenant.tenant_id)
    await deny(counters, lowered.request())
    await age(client, tenant.tenant_id, 20)
    await admit(counters, lowered.request())
    await deny(counters, lowered.request())


async def test_tokens_used_while_there_was_no_limit_are_not_paid_later(counters: Counters) -> None:
    limited = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(tokens_per_minute=50)))
    free = LimitedTenant(tenant_id=limited.tenant_id)
    await admit(counters, limited.request(tokens=1))
    request = free.request(tokens=50)
    await admit(counters, request)
    await counters.settle(limited.tenant_id, request.id, usage_of(50))
    await admit(counters, limited.request(tokens=49))
