"""Admissions, their ends, and what they leave, on a real Valkey."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from redis.asyncio import Redis
from tests.tenants.counters.counting import (
    EMPTY,
    POLICY,
    Customer,
    admit,
    age,
    contents,
    decision,
    deny,
    failed,
    hold_of,
    keys_of,
    used,
)

from loraplex.tenants.counters.counter_replies import (
    Admitted,
    AlreadyEnded,
    CountersMissing,
    Denied,
    PolicyOutdated,
    Settled,
)
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.quotas.limits import COUNTED, MAX_BUDGET, MAX_INTEGER, MAX_RATE, NO_LIMITS, QuotaLimits
from loraplex.tenants.quotas.periods import periods_of
from loraplex.tenants.quotas.reservation import ActualUsage
from loraplex.tenants.valkey import open_valkey, tenant_key

LEVELS = ("tenant", "key", "adapter")
# Of each limit, a value that lets exactly two requests of 10 tokens and 1000 nano-units through.
TWO: Mapping[str, int] = {
    "requests_per_minute": 2,
    "tokens_per_minute": 29,
    "concurrent_requests": 2,
    "tokens_per_day": 29,
    "tokens_per_month": 20,
    "budget_per_day": 2,
    "budget_per_month": 2,
}


def limited(level: str, limits: QuotaLimits) -> Customer:
    tenant, key, adapter = (limits if each == level else NO_LIMITS for each in LEVELS)
    return Customer(tenant, key, adapter)


async def seeded(counters: Counters, customer: Customer) -> Customer:
    assert await counters.seed(customer.tenant_id, 1, EMPTY) == 1
    return customer


async def test_nothing_is_admitted_before_the_counters_are_seeded(counters: Counters) -> None:
    customer = Customer()
    assert await counters.admit(customer.request()) == CountersMissing()
    assert await counters.read(customer.tenant_id, customer.subjects) is None
    await seeded(counters, customer)
    assert isinstance(await counters.admit(customer.request()), Admitted)


async def test_a_policy_only_grows_and_makes_older_requests_stale(counters: Counters) -> None:
    customer = await seeded(counters, Customer())
    assert await counters.publish_policy(customer.tenant_id, POLICY + 2) == POLICY + 2
    assert await counters.publish_policy(customer.tenant_id, POLICY + 1) == POLICY + 2
    assert await counters.admit(customer.request()) == PolicyOutdated(POLICY + 2)
    await admit(counters, customer.request(policy_epoch=POLICY + 2))


async def test_a_request_of_a_newer_policy_makes_older_ones_stale(counters: Counters) -> None:
    customer = await seeded(counters, Customer())
    await admit(counters, customer.request(policy_epoch=POLICY + 1))
    assert await counters.admit(customer.request()) == PolicyOutdated(POLICY + 1)


async def test_a_policy_published_before_the_seeding_is_kept(counters: Counters) -> None:
    customer = Customer()
    await counters.publish_policy(customer.tenant_id, POLICY + 1)
    assert await counters.admit(customer.request(policy_epoch=POLICY + 1)) == CountersMissing()
    await seeded(counters, customer)
    assert await counters.admit(customer.request()) == PolicyOutdated(POLICY + 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", COUNTED)
async def test_every_limit_holds_at_every_level(counters: Counters, level: str, name: str) -> None:
    customer = await seeded(counters, limited(level, QuotaLimits(**{name: TWO[name]})))
    for _ in range(2):
        await admit(counters, customer.request())
    denied = await deny(counters, customer.request())
    assert failed(denied) == [(level, name)]
    (found,) = denied.decisions
    assert found.limit == TWO[name]
    assert found.used + found.reserved == (20 if "tokens" in name else 2)
    assert denied.deciding == found
    assert found.retry_after_s is not None
    assert found.retry_after_s > 0


async def test_another_tenant_and_another_key_are_not_touched(counters: Counters) -> None:
    busy = await seeded(
        counters, Customer(tenant=QuotaLimits(concurrent_requests=2), key=QuotaLimits(tokens_per_day=10))
    )
    await admit(counters, busy.request())
    await deny(counters, busy.request())
    other_key = Customer(tenant=busy.tenant, key=busy.key, tenant_id=busy.tenant_id)
    await admit(counters, other_key.request())
    assert failed(await counters.admit(Customer(tenant=busy.tenant, tenant_id=busy.tenant_id).request())) == [
        ("tenant", "concurrent_requests")
    ]
    await admit(counters, (await seeded(counters, Customer(tenant=busy.tenant, key=busy.key))).request())


async def test_a_denied_request_writes_its_explanation_only(client: Redis, counters: Counters) -> None:
    everything = QuotaLimits(**dict.fromkeys(COUNTED, 100))
    customer = Customer(tenant=everything, key=everything, adapter=QuotaLimits(tokens_per_month=15))
    await admit(counters, (await seeded(counters, customer)).request())
    before = await contents(client, customer.tenant_id)
    denied = await deny(counters, customer.request(request_id="seen"))
    assert failed(denied) == [("adapter", "tokens_per_month")]
    assert len(denied.decisions) == 15
    after = await contents(client, customer.tenant_id)
    assert after.pop(tenant_key(customer.tenant_id, "denials"))
    assert after == before
    explanation = await counters.explain(customer.tenant_id, "seen")
    assert explanation is not None
    assert explanation.request_id == "seen"
    assert (explanation.at, explanation.decisions) == (denied.at, denied.decisions)


async def test_the_same_id_again_is_the_same_admission(client: Redis, counters: Counters) -> None:
    limits = QuotaLimits(requests_per_minute=1, tokens_per_minute=10, concurrent_requests=1, budget_per_day=1)
    customer = await seeded(counters, Customer(tenant=limits))
    request = customer.request()
    first = await admit(counters, request)
    before = await contents(client, customer.tenant_id)
    again = await admit(counters, request)
    assert (first.repeated, again.repeated) == (False, True)
    assert (again.at, again.day, again.month, again.epoch) == (first.at, first.day, first.month, first.epoch)
    assert [each.remaining for each in again.decisions] == [0, 0, 0, 0]
    assert await contents(client, customer.tenant_id) == before


async def test_an_admission_stands_when_its_limit_was_lowered_since(counters: Counters) -> None:
    customer = await seeded(counters, Customer(tenant=QuotaLimits(tokens_per_day=100)))
    request = customer.request(tokens=50)
    await admit(counters, request)
    lowered = Customer(QuotaLimits(tokens_per_day=20), tenant_id=customer.tenant_id)
    again = await admit(counters, lowered.request(tokens=50, id=request.id))
    assert [(each.passed, each.remaining) for each in again.decisions] == [(True, 0)]


async def test_what_is_settled_and_reserved_can_be_read(counters: Counters) -> None:
    limits = QuotaLimits(tokens_per_minute=6000, tokens_per_day=500, budget_per_month=7)
    customer = await seeded(counters, Customer(tenant=limits))
    first, second = customer.request(100, 2500), customer.request(50, 1500, base=True)
    await admit(counters, first)
    answer = await admit(counters, second)
    assert decision(answer, "tenant", "budget_per_month").remaining == 7 - 3 - 2
    assert await counters.settle(customer.tenant_id, first.id, ActualUsage(30, 700)) == Settled(True)
    uses = await used(counters, customer)
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
        customer = await seeded(counters, Customer(key=QuotaLimits(**{name: 9})))
        denied = await deny(counters, customer.request())
        assert denied.exhausted
        assert denied.deciding.retry_after_s is None


async def test_a_budget_held_by_open_requests_is_worth_another_try(counters: Counters) -> None:
    customer = await seeded(counters, Customer(tenant=QuotaLimits(tokens_per_day=15)))
    request = customer.request()
    await admit(counters, request)
    assert not (await deny(counters, customer.request())).exhausted
    await counters.settle(customer.tenant_id, request.id, ActualUsage(10, 0))
    assert (await deny(counters, customer.request())).exhausted
    await admit(counters, customer.request(tokens=5))


async def test_the_largest_numbers_are_exact(counters: Counters) -> None:
    limits = QuotaLimits(
        requests_per_minute=MAX_RATE,
        tokens_per_minute=MAX_RATE,
        tokens_per_day=MAX_INTEGER,
        tokens_per_month=MAX_INTEGER,
        budget_per_day=MAX_BUDGET,
        budget_per_month=MAX_BUDGET,
    )
    customer = await seeded(counters, Customer(tenant=limits))
    whole = customer.request(MAX_RATE, MAX_BUDGET * 1000 - 1)
    await admit(counters, whole)
    assert failed(await counters.admit(customer.request(1, 2))) == [
        ("tenant", "tokens_per_minute"),
        ("tenant", "budget_per_day"),
        ("tenant", "budget_per_month"),
    ]
    await counters.settle(customer.tenant_id, whole.id, ActualUsage(0, MAX_BUDGET * 1000 - 1))
    await admit(counters, customer.request(1, 1))
    await deny(counters, customer.request(0, 1))


async def test_tokens_beyond_every_limit_are_counted_exactly(counters: Counters) -> None:
    customer = await seeded(counters, Customer())
    for _ in range(3):
        request = customer.request(MAX_INTEGER)
        await admit(counters, request)
        await counters.settle(customer.tenant_id, request.id, ActualUsage(MAX_INTEGER, 0))
    assert (await used(counters, customer))["tenant", "tokens_per_day"].used == 3 * MAX_INTEGER
    limited = Customer(QuotaLimits(tokens_per_day=MAX_INTEGER), tenant_id=customer.tenant_id)
    await deny(counters, limited.request(0))


async def test_an_end_is_counted_once(counters: Counters) -> None:
    customer = await seeded(counters, Customer())
    request = customer.request()
    await admit(counters, request)
    assert await counters.settle(customer.tenant_id, request.id, ActualUsage(4, 5)) == Settled(True)
    assert await counters.settle(customer.tenant_id, request.id, ActualUsage(4, 5)) == Settled(False)
    assert await counters.release(customer.tenant_id, request.id) == Settled(False)
    uses = await used(counters, customer)
    assert (uses["key", "tokens_per_day"].used, uses["key", "tokens_per_day"].reserved) == (4, 0)
    assert uses["tenant", "concurrent_requests"].used == 0


async def test_an_admission_that_arrives_after_its_release_takes_nothing(counters: Counters) -> None:
    customer = await seeded(counters, Customer())
    request = customer.request()
    await counters.release(customer.tenant_id, request.id)
    assert await counters.admit(request) == AlreadyEnded()
    assert (await used(counters, customer))["tenant", "tokens_per_day"].reserved == 0


async def test_a_use_without_reservation_is_charged_once_and_under_its_epoch(counters: Counters) -> None:
    customer = await seeded(counters, Customer())
    admitted = await admit(counters, customer.request(tokens=0))
    for epoch, charged in ((2, False), (1, True), (None, True)):
        hold = hold_of(customer.request(), admitted, epoch)
        for expected in (charged, False):
            settled = await counters.settle(customer.tenant_id, hold.id, ActualUsage(3, 0), charge=hold)
            assert settled == Settled(False, expected)
            # An id that was charged is not charged again, and one that was not is not remembered as charged.
    assert (await used(counters, customer))["key", "tokens_per_month"].used == 6


async def test_every_key_expires_and_the_state_first(client: Redis, counters: Counters) -> None:
    limits = QuotaLimits(requests_per_minute=5, tokens_per_minute=100, concurrent_requests=1)
    customer = await seeded(counters, Customer(tenant=limits, adapter=limits))
    request = customer.request()
    await admit(counters, request)
    await deny(counters, customer.request())
    await counters.settle(customer.tenant_id, request.id, ActualUsage(1, 1))
    await admit(counters, customer.request())
    lives = {key: await client.ttl(key) for key in await keys_of(client, customer.tenant_id)}
    state = lives.pop(tenant_key(customer.tenant_id, "state"))
    short = [lives.pop(key) for key in list(lives) if key.endswith((":denials", ":ended"))]
    assert len(lives) == 3 * 2 + 3 + 3 + 1
    assert 0 < max(short) <= 86_400 < state < min(lives.values())


async def test_after_quiescence_no_reservation_is_left(client: Redis, counters: Counters) -> None:
    customer = await seeded(counters, Customer(tenant=QuotaLimits(tokens_per_minute=1000)))
    requests = [customer.request() for _ in range(5)]
    for request in requests:
        await admit(counters, request)
        await counters.settle(customer.tenant_id, request.id, ActualUsage(1, 1))
    assert not [
        key for key in await keys_of(client, customer.tenant_id) if ":leases" in key or ":open" in key
    ]


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
async def test_the_periods_are_those_of_the_calendar(
    client: Redis, counters: Counters, time: datetime
) -> None:
    customer = await seeded(counters, Customer(tenant=QuotaLimits(tokens_per_day=10, tokens_per_month=20)))
    await admit(counters, customer.request())
    # A clock that was once seen this far is never gone behind.
    seen = round(time.timestamp() * 1_000_000)
    await client.hset(tenant_key(customer.tenant_id, "state"), "clock", str(seen))
    admitted = await admit(counters, customer.request())
    assert admitted.at == time
    assert (admitted.day, admitted.month) == (periods_of(time).day, periods_of(time).month)
    denied = await deny(counters, customer.request())
    end = denied.deciding.retry_after_s
    assert end is not None
    assert 0 < end <= 86_400


async def test_denials_are_kept_for_a_thousand_requests(client: Redis, counters: Counters) -> None:
    customer = await seeded(counters, Customer(tenant=QuotaLimits(concurrent_requests=0)))
    for number in range(1003):
        await deny(counters, customer.request(request_id=f"request-{number}"))
    assert await client.llen(tenant_key(customer.tenant_id, "denials")) == 1000
    assert await counters.explain(customer.tenant_id, "request-2") is None
    assert await counters.explain(customer.tenant_id, "request-3") is not None
    assert await counters.explain(customer.tenant_id, "request-100") is not None
    assert await counters.explain(customer.tenant_id, "request-") is None
    assert await counters.explain(uuid4(), "request-100") is None


@pytest.mark.parametrize("name", COUNTED)
async def test_two_hundred_at_once_get_what_there_is(valkey_url: str, counters: Counters, name: str) -> None:
    limit = {"tokens_per_minute": 509, "tokens_per_day": 509, "tokens_per_month": 500}.get(name, 50)
    customer = await seeded(counters, Customer(adapter=QuotaLimits(**{name: limit})))
    other_client = open_valkey(valkey_url, command_s=10.0)
    gateways = (counters, Counters(other_client, command_s=10.0))
    answers = await asyncio.gather(*(gateways[number % 2].admit(customer.request()) for number in range(200)))
    await other_client.aclose()
    admitted = sum(isinstance(answer, Admitted) for answer in answers)
    # A bucket of 50 or 509 per minute refills by at most one request in the seconds this may take.
    assert 50 <= admitted <= (51 if name.endswith("per_minute") else 50)
    assert all(isinstance(answer, Admitted | Denied) for answer in answers)


async def test_a_bucket_refills_as_it_says(client: Redis, counters: Counters) -> None:
    customer = await seeded(counters, Customer(tenant=QuotaLimits(requests_per_minute=6)))
    for _ in range(6):
        await admit(counters, customer.request())
    denied = await deny(counters, customer.request())
    wait = denied.deciding.retry_after_s
    assert wait is not None
    assert 9 < wait <= 10
    await age(client, customer.tenant_id, wait - 1)
    await deny(counters, customer.request())
    await age(client, customer.tenant_id, 1)
    await admit(counters, customer.request())
    await deny(counters, customer.request())
    await age(client, customer.tenant_id, 3600)
    for _ in range(6):
        await admit(counters, customer.request())
    await deny(counters, customer.request())


async def test_a_late_settle_gives_no_token_twice(client: Redis, counters: Counters) -> None:
    """What the bucket regained while a request ran must not be given back once more when it ends unused."""
    customer = await seeded(counters, Customer(tenant=QuotaLimits(tokens_per_minute=60)))
    unused, whole = customer.request(tokens=60), customer.request(tokens=60)
    await admit(counters, unused)
    await age(client, customer.tenant_id, 60)
    await deny(counters, whole)
    await counters.settle(customer.tenant_id, unused.id, ActualUsage(0, 0))
    await admit(counters, whole)
    await counters.settle(customer.tenant_id, whole.id, ActualUsage(60, 0))
    await deny(counters, customer.request(tokens=2))
    await age(client, customer.tenant_id, 30)
    await deny(counters, customer.request(tokens=32))
    await admit(counters, customer.request(tokens=30))


async def test_a_lowered_limit_holds_at_once(counters: Counters) -> None:
    customer = await seeded(
        counters, Customer(tenant=QuotaLimits(requests_per_minute=100, tokens_per_day=100))
    )
    for _ in range(5):
        await admit(counters, customer.request())
    lowered = QuotaLimits(requests_per_minute=3, tokens_per_day=20)
    answer = await deny(counters, Customer(lowered, tenant_id=customer.tenant_id).request())
    assert failed(answer) == [("tenant", "requests_per_minute"), ("tenant", "tokens_per_day")]
    assert [each.remaining for each in answer.decisions] == [0, 0]


async def test_a_bucket_of_a_lowered_limit_is_empty_and_no_emptier(client: Redis, counters: Counters) -> None:
    customer = await seeded(counters, Customer(tenant=QuotaLimits(requests_per_minute=100)))
    for _ in range(9):
        await admit(counters, customer.request())
    lowered = Customer(QuotaLimits(requests_per_minute=3), tenant_id=customer.tenant_id)
    await deny(counters, lowered.request())
    await age(client, customer.tenant_id, 20)
    await admit(counters, lowered.request())
    await deny(counters, lowered.request())


async def test_tokens_used_while_there_was_no_limit_are_not_paid_later(counters: Counters) -> None:
    limited = await seeded(counters, Customer(tenant=QuotaLimits(tokens_per_minute=50)))
    free = Customer(tenant_id=limited.tenant_id)
    await admit(counters, limited.request(tokens=1))
    request = free.request(tokens=50)
    await admit(counters, request)
    await counters.settle(limited.tenant_id, request.id, ActualUsage(50, 0))
    await admit(counters, limited.request(tokens=49))


async def test_no_counter_is_negative_when_one_was_lost(client: Redis, counters: Counters) -> None:
    customer = await seeded(counters, Customer(tenant=QuotaLimits(tokens_per_minute=50)))
    request = customer.request()
    await admit(counters, request)
    await client.delete(
        *(key for key in await keys_of(client, customer.tenant_id) if ":use:" in key or ":rate:" in key)
    )
    await admit(counters, customer.request(tokens=3))
    await counters.settle(customer.tenant_id, request.id, ActualUsage(4, 5))
    for use in (await used(counters, customer)).values():
        assert use.used >= 0
        assert use.reserved >= 0
    assert (await used(counters, customer))["adapter", "tokens_per_day"].used == 4


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 201, "line\n"])
def test_request_ids_are_harmless(request_id: str) -> None:
    with pytest.raises(InvalidField, match="request_id"):
        Customer().request(request_id=request_id)
