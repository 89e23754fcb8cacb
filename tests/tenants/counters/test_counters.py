"""Admissions, their ends, and what they leave, on a real Valkey."""

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from redis.asyncio import Redis
from tests.tenants.counters.limited_tenant import (
    LEVELS,
    POLICY,
    LimitedTenant,
    admit,
    contents,
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
from tests.tenants.counters.server_clock import set_server_clock

from loraplex.tenants.counters.counter_replies import (
    RETRY_S,
    Admitted,
    AlreadyEnded,
    CountersMissing,
    Denied,
    PolicyOutdated,
    Settled,
)
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.periods import periods_of
from loraplex.tenants.quotas.limits import COUNTED, MAX_BUDGET, MAX_INTEGER, MAX_RATE, QuotaLimits
from loraplex.tenants.valkey import open_valkey, tenant_key

# Of each limit, a value that lets exactly two requests of 10 tokens and 1000 nano-units through.
TWO: Mapping[str, int] = {
    "requests_per_minute": 2,
    "tokens_per_minute": 29,
    "concurrent_requests": 2,
    "tokens_per_day": 29,
    "tokens_per_month": 20,
    "budget_per_day": 2,
    "budget_per_month": 2,
    "tokens_per_session": 20,
}


async def test_nothing_is_admitted_before_the_counters_are_built(counters: Counters) -> None:
    tenant = LimitedTenant()
    assert await counters.reserve(tenant.request()) == CountersMissing()
    assert await counters.read(tenant.tenant_id, tenant.subjects) is None
    await with_counters(counters, tenant)
    assert isinstance(await counters.reserve(tenant.request()), Admitted)


async def test_a_policy_only_grows_and_makes_older_requests_stale(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant())
    assert await counters.publish_policy(tenant.tenant_id, POLICY + 2) == POLICY + 2
    assert await counters.publish_policy(tenant.tenant_id, POLICY + 1) == POLICY + 2
    assert await counters.reserve(tenant.request()) == PolicyOutdated(POLICY + 2)
    await admit(counters, tenant.request(policy_epoch=POLICY + 2))


async def test_a_request_of_a_newer_policy_makes_older_ones_stale(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant())
    await admit(counters, tenant.request(policy_epoch=POLICY + 1))
    assert await counters.reserve(tenant.request()) == PolicyOutdated(POLICY + 1)


async def test_a_policy_published_before_the_rebuild_is_kept(counters: Counters) -> None:
    tenant = LimitedTenant()
    await counters.publish_policy(tenant.tenant_id, POLICY + 1)
    assert await counters.reserve(tenant.request(policy_epoch=POLICY + 1)) == CountersMissing()
    await with_counters(counters, tenant)
    assert await counters.reserve(tenant.request()) == PolicyOutdated(POLICY + 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", COUNTED)
async def test_every_limit_holds_at_every_level(counters: Counters, level: str, name: str) -> None:
    tenant = await with_counters(counters, limited(level, QuotaLimits(**{name: TWO[name]})))
    for _ in range(2):
        await admit(counters, tenant.request(session="s"))
    denied = await deny(counters, tenant.request(session="s"))
    assert failed(denied) == [(level, name)]
    (found,) = denied.decisions
    assert found.limit == TWO[name]
    assert found.used + found.reserved == (20 if "tokens" in name else 2)
    assert denied.deciding == found
    assert found.retry_after_s is not None
    assert found.retry_after_s > 0


async def test_another_tenant_and_another_key_are_not_touched(counters: Counters) -> None:
    busy = await with_counters(
        counters, LimitedTenant(tenant=QuotaLimits(concurrent_requests=2), key=QuotaLimits(tokens_per_day=10))
    )
    await admit(counters, busy.request())
    await deny(counters, busy.request())
    other_key = LimitedTenant(tenant=busy.tenant, key=busy.key, tenant_id=busy.tenant_id)
    await admit(counters, other_key.request())
    assert failed(
        await counters.reserve(LimitedTenant(tenant=busy.tenant, tenant_id=busy.tenant_id).request())
    ) == [("tenant", "concurrent_requests")]
    await admit(
        counters, (await with_counters(counters, LimitedTenant(tenant=busy.tenant, key=busy.key))).request()
    )


async def test_a_denied_request_writes_its_explanation_only(client: Redis, counters: Counters) -> None:
    everything = QuotaLimits(**dict.fromkeys(COUNTED, 100))
    tenant = LimitedTenant(tenant=everything, key=everything, adapter=QuotaLimits(tokens_per_month=15))
    await admit(counters, (await with_counters(counters, tenant)).request())
    before = await contents(client, tenant.tenant_id)
    denied = await deny(counters, tenant.request(request_id="seen"))
    assert failed(denied) == [("adapter", "tokens_per_month")]
    assert len(denied.decisions) == 15
    after = await contents(client, tenant.tenant_id)
    assert after.pop(tenant_key(tenant.tenant_id, "denials"))
    assert after == before
    explanation = await counters.explain(tenant.tenant_id, "seen")
    assert explanation is not None
    assert explanation.request_id == "seen"
    assert (explanation.at, explanation.decisions) == (denied.at, denied.decisions)


async def test_the_same_id_again_is_the_same_admission(client: Redis, counters: Counters) -> None:
    limits = QuotaLimits(requests_per_minute=1, tokens_per_minute=10, concurrent_requests=1, budget_per_day=1)
    tenant = await with_counters(counters, LimitedTenant(tenant=limits))
    request = tenant.request()
    first = await admit(counters, request)
    before = await contents(client, tenant.tenant_id)
    again = await admit(counters, request)
    assert (first.repeated, again.repeated) == (False, True)
    assert (again.at, again.day, again.month, again.epoch) == (first.at, first.day, first.month, first.epoch)
    assert [each.remaining for each in again.decisions] == [0, 0, 0, 0]
    assert await contents(client, tenant.tenant_id) == before


async def test_an_admission_stands_when_its_limit_was_lowered_since(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(tokens_per_day=100)))
    request = tenant.request(tokens=50)
    await admit(counters, request)
    lowered = LimitedTenant(QuotaLimits(tokens_per_day=20), tenant_id=tenant.tenant_id)
    again = await admit(counters, lowered.request(tokens=50, id=request.id))
    assert [(each.passed, each.remaining) for each in again.decisions] == [(True, 0)]


async def test_settled_and_reserved_use_can_be_read(counters: Counters) -> None:
    limits = QuotaLimits(tokens_per_minute=6000, tokens_per_day=500, budget_per_month=7)
    tenant = await with_counters(counters, LimitedTenant(tenant=limits))
    first, second = tenant.request(100, 2500), tenant.request(50, 1500, base=True)
    await admit(counters, first)
    reply = await admit(counters, second)
    assert decision(reply, "tenant", "budget_per_month").remaining == 7 - 3 - 2
    assert await counters.settle(tenant.tenant_id, first.id, usage_of(30, 700)) == Settled(True)
    uses = await used(counters, tenant)
    day = uses["tenant", "tokens_per_day"]
    assert (day.limit, day.used, day.reserved) == (500, 30, 50)
    assert day.resets_at is not None
    assert day.resets_at > datetime.now(UTC)
    month = uses["tenant", "budget_per_month"]
    assert (month.limit, month.used, month.reserved) == (7, 1, 2)
    minute = uses["tenant", "tokens_per_minute"]
    assert (minute.reserved, minute.used in (29, 30)) == (50, True)
    assert uses["adapter", "tokens_per_day"].used == 30
    assert uses["adapter", "tokens_per_day"].reserved == 0
    assert uses["key", "concurrent_requests"].used == 1


async def test_a_request_larger_than_a_limit_is_denied_for_ever(counters: Counters) -> None:
    for name in ("tokens_per_minute", "tokens_per_day"):
        tenant = await with_counters(counters, LimitedTenant(key=QuotaLimits(**{name: 9})))
        denied = await deny(counters, tenant.request())
        assert denied.exhausted
        assert denied.deciding.retry_after_s is None


@pytest.mark.parametrize(
    "limits",
    [QuotaLimits(tokens_per_day=15), QuotaLimits(tokens_per_month=15), QuotaLimits(budget_per_month=15)],
)
async def test_a_limit_that_open_requests_fill_allows_a_retry_soon(
    counters: Counters, limits: QuotaLimits
) -> None:
    set_server_clock(counters, datetime(2026, 11, 21, 23, 59, tzinfo=UTC))
    tenant = await with_counters(counters, LimitedTenant(tenant=limits))
    request = tenant.request(10, 10_000)
    await admit(counters, request)
    deciding = (await deny(counters, tenant.request(10, 10_000))).deciding
    assert (deciding.exhausted, deciding.retry_after_s) == (False, RETRY_S)
    await counters.settle(tenant.tenant_id, request.id, usage_of(10, 10_000))
    deciding = (await deny(counters, tenant.request(10, 10_000))).deciding
    assert deciding.exhausted and deciding.retry_after_s is not None and deciding.retry_after_s >= 60.0
    await admit(counters, tenant.request(5, 5_000))


async def test_a_limit_that_open_requests_fill_waits_no_longer_than_its_period(counters: Counters) -> None:
    set_server_clock(counters, datetime(2026, 11, 21, 23, 59, 59, 750_000, tzinfo=UTC))
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(tokens_per_day=15)))
    await admit(counters, tenant.request())
    assert (await deny(counters, tenant.request())).deciding.retry_after_s == 0.25


async def test_the_largest_numbers_are_exact(counters: Counters) -> None:
    limits = QuotaLimits(
        requests_per_minute=MAX_RATE,
        tokens_per_minute=MAX_RATE,
        tokens_per_day=MAX_INTEGER,
        tokens_per_month=MAX_INTEGER,
        budget_per_day=MAX_BUDGET,
        budget_per_month=MAX_BUDGET,
    )
    tenant = await with_counters(counters, LimitedTenant(tenant=limits))
    whole = tenant.request(MAX_RATE, MAX_BUDGET * 1000 - 1)
    await admit(counters, whole)
    assert failed(await counters.reserve(tenant.request(1, 2))) == [
        ("tenant", "tokens_per_minute"),
        ("tenant", "budget_per_day"),
        ("tenant", "budget_per_month"),
    ]
    await counters.settle(tenant.tenant_id, whole.id, usage_of(0, MAX_BUDGET * 1000 - 1))
    await admit(counters, tenant.request(1, 1))
    await deny(counters, tenant.request(0, 1))


async def test_tokens_beyond_every_limit_are_counted_exactly(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant())
    for _ in range(3):
        request = tenant.request(MAX_INTEGER)
        await admit(counters, request)
        await counters.settle(tenant.tenant_id, request.id, usage_of(MAX_INTEGER))
    assert (await used(counters, tenant))["tenant", "tokens_per_day"].used == 3 * MAX_INTEGER
    limited = LimitedTenant(QuotaLimits(tokens_per_day=MAX_INTEGER), tenant_id=tenant.tenant_id)
    await deny(counters, limited.request(0))


async def test_an_end_is_counted_once(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant())
    request = tenant.request()
    await admit(counters, request)
    assert await counters.settle(tenant.tenant_id, request.id, usage_of(4, 5)) == Settled(True)
    assert await counters.settle(tenant.tenant_id, request.id, usage_of(4, 5)) == Settled(False)
    assert await counters.cancel(tenant.tenant_id, request.id) == Settled(False)
    uses = await used(counters, tenant)
    assert (uses["key", "tokens_per_day"].used, uses["key", "tokens_per_day"].reserved) == (4, 0)
    assert uses["tenant", "concurrent_requests"].used == 0


async def test_an_admission_that_arrives_after_its_release_takes_nothing(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant())
    request = tenant.request()
    await counters.cancel(tenant.tenant_id, request.id)
    assert await counters.reserve(request) == AlreadyEnded()
    assert (await used(counters, tenant))["tenant", "tokens_per_day"].reserved == 0


async def test_a_use_without_reservation_is_charged_once_and_under_its_epoch(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant())
    admitted = await admit(counters, tenant.request(tokens=0))
    for epoch, charged in ((2, False), (1, True), (None, True)):
        reserved = reserved_of(tenant.request(), admitted, epoch)
        for expected in (charged, False):
            settled = await counters.settle(tenant.tenant_id, reserved.id, usage_of(3), charge=reserved)
            assert settled == Settled(False, expected)
            # An id that was charged is not charged again, and one that was not is not remembered as charged.
    assert (await used(counters, tenant))["key", "tokens_per_month"].used == 6


async def test_every_key_expires_and_the_state_first(client: Redis, counters: Counters) -> None:
    limits = QuotaLimits(requests_per_minute=5, tokens_per_minute=100, concurrent_requests=1)
    tenant = await with_counters(counters, LimitedTenant(tenant=limits, adapter=limits))
    request = tenant.request()
    await admit(counters, request)
    await deny(counters, tenant.request())
    await counters.settle(tenant.tenant_id, request.id, usage_of(1, 1))
    await admit(counters, tenant.request())
    lives = {key: await client.ttl(key) for key in await keys_of(client, tenant.tenant_id)}
    state = lives.pop(tenant_key(tenant.tenant_id, "state"))
    short = [lives.pop(key) for key in list(lives) if key.endswith((":denials", ":ended"))]
    assert len(lives) == 3 * 2 + 3 + 3 + 1
    assert 0 < max(short) <= 86_400 < state < min(lives.values())


async def test_after_quiescence_no_reservation_is_left(client: Redis, counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(tokens_per_minute=1000)))
    requests = [tenant.request() for _ in range(5)]
    for request in requests:
        await admit(counters, request)
        await counters.settle(tenant.tenant_id, request.id, usage_of(1, 1))
    assert not [key for key in await keys_of(client, tenant.tenant_id) if ":leases" in key or ":open" in key]


@pytest.mark.parametrize(
    "time",
    [
        datetime(2027, 1, 1, tzinfo=UTC),
        datetime(2027, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(2028, 2, 28, 23, 59, 59, tzinfo=UTC),
        datetime(2028, 2, 29, 12, tzinfo=UTC),
        datetime(2028, 3, 1, tzinfo=UTC),
        datetime(2029, 2, 28, tzinfo=UTC),
        datetime(2100, 2, 28, 23, tzinfo=UTC),
        datetime(2100, 3, 1, tzinfo=UTC),
    ],
)
async def test_the_periods_are_those_of_the_calendar(counters: Counters, time: datetime) -> None:
    set_server_clock(counters, datetime(2026, 11, 21, tzinfo=UTC))
    tenant = await with_counters(
        counters, LimitedTenant(tenant=QuotaLimits(tokens_per_day=10, tokens_per_month=20))
    )
    await admit(counters, tenant.request())
    set_server_clock(counters, time)
    admitted = await admit(counters, tenant.request())
    assert admitted.at == time
    assert (admitted.day, admitted.month) == (periods_of(time).day, periods_of(time).month)
    denied = await deny(counters, tenant.request())
    end = denied.deciding.retry_after_s
    assert end is not None
    assert 0 < end <= 86_400


async def test_denials_are_kept_for_a_thousand_requests(client: Redis, counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(concurrent_requests=0)))
    for number in range(1003):
        await deny(counters, tenant.request(request_id=f"request-{number}"))
    assert await client.llen(tenant_key(tenant.tenant_id, "denials")) == 1000
    assert await counters.explain(tenant.tenant_id, "request-2") is None
    assert await counters.explain(tenant.tenant_id, "request-3") is not None
    assert await counters.explain(tenant.tenant_id, "request-100") is not None
    assert await counters.explain(tenant.tenant_id, "request-") is None
    assert await counters.explain(uuid4(), "request-100") is None


@pytest.mark.parametrize("name", COUNTED)
async def test_two_hundred_concurrent_requests_get_exactly_the_limit(
    valkey_url: str, counters: Counters, name: str
) -> None:
    limit = dict.fromkeys(("tokens_per_month", "tokens_per_session"), 500).get(name, 50)
    limit = 509 if name in ("tokens_per_minute", "tokens_per_day") else limit
    tenant = await with_counters(counters, LimitedTenant(adapter=QuotaLimits(**{name: limit})))
    other_client = open_valkey(valkey_url, command_s=10.0)
    gateways = (counters, Counters(other_client, command_s=10.0))
    began = time.monotonic()
    replies = await asyncio.gather(
        *(gateways[number % 2].reserve(tenant.request(session="s")) for number in range(200))
    )
    # A bucket of 50 or 509 per minute refills by less than a request in a second.
    refilled = 1 + int(time.monotonic() - began) if name.endswith("per_minute") else 0
    await other_client.aclose()
    admitted = sum(isinstance(reply, Admitted) for reply in replies)
    assert 50 <= admitted <= 50 + refilled
    assert all(isinstance(reply, Admitted | Denied) for reply in replies)


async def test_no_counter_is_negative_when_one_was_lost(client: Redis, counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=QuotaLimits(tokens_per_minute=50)))
    request = tenant.request()
    await admit(counters, request)
    await client.delete(
        *(key for key in await keys_of(client, tenant.tenant_id) if ":use:" in key or ":rate:" in key)
    )
    await admit(counters, tenant.request(tokens=3))
    await counters.settle(tenant.tenant_id, request.id, usage_of(4, 5))
    for use in (await used(counters, tenant)).values():
        assert use.used >= 0
        assert use.reserved >= 0
    assert (await used(counters, tenant))["adapter", "tokens_per_day"].used == 4


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 201, "line\n"])
def test_request_ids_are_harmless(request_id: str) -> None:
    with pytest.raises(InvalidField, match="request_id"):
        LimitedTenant().request(request_id=request_id)
