"""A draft of limits is replayed by the buckets of admission, and a request that it refuses uses nothing."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.admission.replay import Replay
from loraplex.tenants.errors import RateLimited
from loraplex.tenants.ids import uuid7
from loraplex.tenants.ledger.usage_steps import PeriodUse, UsageStep
from loraplex.tenants.quotas.limits import QuotaLimits, Subject

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
TEN = timedelta(seconds=10)


def replayed(
    draft: QuotaLimits, steps: list[UsageStep], used_before: dict[str, PeriodUse] | None = None
) -> Replay:
    replay = Replay(draft, used_before or {})
    for step in steps:
        replay.add(step)
    return replay


def step(number: int, requests: int = 1, tokens: int = 0, nano: int = 0, crowded: int = 0) -> UsageStep:
    return UsageStep(
        start=NOON + number * TEN, requests=requests, tokens=tokens, amount_nano=nano, crowded=crowded
    )


def test_a_burst_is_refused_and_as_many_requests_that_come_evenly_are_not() -> None:
    draft = QuotaLimits(requests_per_minute=60)
    evenly = replayed(draft, [step(number, 10) for number in range(12)])
    burst = replayed(draft, [step(0, 50), step(1, 70)])
    assert (evenly.refused, evenly.first) == (0, None)
    assert (burst.requests, burst.refused, burst.first) == (120, 50, NOON + TEN)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=30), st.integers(1, 30))
def test_requests_per_minute_are_refused_as_by_admission(uses: list[tuple[int, int]], limit: int) -> None:
    now = 0.0
    limiter, refused, at = LocalLimiter(lambda: now), 0, 0
    subject, steps = Subject("tenant", uuid7(), QuotaLimits(requests_per_minute=limit)), []
    for pause, requests in uses:
        at += pause
        steps.append(step(at, requests))
        now = steps[-1].start.timestamp()
        for _ in range(requests):
            try:
                limiter.admit(uuid7(), (subject,), 0)
            except RateLimited:
                refused += 1
        at += 1
    assert replayed(subject.limits, steps).refused == refused


def test_days_and_months_begin_with_what_was_used_and_at_zero() -> None:
    draft = QuotaLimits(tokens_per_month=1000, tokens_per_day=600, budget_per_day=2)
    day = 8640
    steps = [step(0, 4, 400, 4000), step(day, 2, 200, 2000), step(day + 1, 2, 200)]
    found = replayed(draft, steps, {"m:2026-11": PeriodUse(500)})
    by_name = {each.name: each for each in found.limits}
    assert (by_name["budget_per_day"].refused, by_name["budget_per_day"].first) == (2, NOON)
    assert by_name["tokens_per_day"].refused == 0
    assert (by_name["tokens_per_month"].refused, by_name["tokens_per_month"].first) == (
        1,
        NOON + (day + 1) * TEN,
    )
    assert (found.requests, found.refused) == (8, 3)


def test_what_one_limit_refuses_uses_nothing_of_the_others() -> None:
    draft = QuotaLimits(tokens_per_day=100, concurrent_requests=1)
    found = replayed(draft, [step(0, 4, 120, crowded=2), step(1, 1, 40), step(2)])
    assert [(each.name, each.refused, each.first) for each in found.limits] == [
        ("concurrent_requests", 2, NOON),
        ("tokens_per_day", 1, NOON),
    ]
    assert found.refused == 2


def test_requests_that_used_nothing_are_refused_where_more_than_the_limit_was_used() -> None:
    draft, before = QuotaLimits(tokens_per_month=100), {"m:2026-11": PeriodUse(tokens=101)}
    assert replayed(draft, [step(0, 2, tokens=0)], before).refused == 2
    assert replayed(draft, [step(0, 2, tokens=0)]).refused == 0


def test_a_limit_of_zero_refuses_all() -> None:
    draft = QuotaLimits(requests_per_minute=0, tokens_per_minute=0, budget_per_month=0)
    assert replayed(draft, [step(0, 3, 9, 9)]).refused == 3
