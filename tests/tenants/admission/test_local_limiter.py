"""A gateway's share of the limits: floors, all or nothing, and back again."""

from uuid import UUID

import pytest

from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.errors import LimitExceeded, QuotaExhausted, RateLimited
from loraplex.tenants.quotas.limits import QuotaLimits, Subject
from loraplex.tenants.rate_state import Rate, RateState


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def subject(**limits: int) -> Subject:
    return Subject("tenant", UUID(int=1), QuotaLimits(**limits))


def admitted(limiter: LocalLimiter, *subjects: Subject, tokens: int = 1, most: int = 100) -> int:
    """How many pass before the first refusal."""
    for number in range(most):
        try:
            limiter.admit(UUID(int=1000 + number), subjects, tokens)
        except LimitExceeded:
            return number
    return most


@pytest.mark.parametrize(("gateways", "passing"), [(1, 10), (3, 3), (4, 2), (11, 0)])
def test_a_share_is_the_limit_by_the_gateways_that_live(gateways: int, passing: int) -> None:
    limiter = LocalLimiter(Clock())
    limiter.live_gateways = gateways
    assert admitted(limiter, subject(requests_per_minute=10)) == passing
    assert admitted(limiter, subject(concurrent_requests=passing * gateways)) == 0


def test_a_refused_request_is_given_back_but_for_what_has_flowed_back() -> None:
    clock, tenant = Clock(), subject(requests_per_minute=6)
    limiter = LocalLimiter(clock)
    held = [UUID(int=number) for number in range(6)]
    for each in held:
        limiter.admit(each, (tenant,), 1)
    limiter.settle(held[0], 0, refused=True)
    assert admitted(limiter, tenant) == 1
    clock.now = 30.0
    assert admitted(limiter, tenant, most=3) == 3
    for each in held:
        limiter.settle(each, 0, refused=True)
    assert admitted(limiter, tenant) == 0


def test_a_bucket_refills_by_its_share() -> None:
    clock = Clock()
    limiter = LocalLimiter(clock)
    limiter.live_gateways = 2
    limited = subject(tokens_per_minute=240)
    assert admitted(limiter, limited, tokens=60) == 2
    with pytest.raises(RateLimited) as refused:
        limiter.admit(UUID(int=1), (limited,), 60)
    assert (refused.value.limit, refused.value.retry_after_s) == ("tokens_per_minute", 30.0)
    assert refused.value.rate == RateState(tokens=Rate(240, 0, 60.0)) and refused.value.degraded
    for number in range(2):
        limiter.settle(UUID(int=1000 + number), 60)
    clock.now = 30.0
    assert admitted(limiter, limited, tokens=60) == 1


def test_tokens_of_running_requests_are_not_given_out_again_while_the_bucket_refills() -> None:
    """Else a bound that comes back unused after a minute would be there twice."""
    clock = Clock()
    limiter, limited = LocalLimiter(clock), subject(tokens_per_minute=60)
    limiter.admit(UUID(int=1), (limited,), 60)
    clock.now = 60.0
    passed = admitted(limiter, limited, tokens=60)
    limiter.settle(UUID(int=1), 0)
    assert passed + admitted(limiter, limited, tokens=60) == 1


def test_use_without_a_limit_empties_a_new_bucket_at_most() -> None:
    clock = Clock()
    limiter = LocalLimiter(clock)
    assert admitted(limiter, subject(), tokens=1000) == 100
    for number in range(100):
        limiter.settle(UUID(int=1000 + number), 1000)
    limited = subject(tokens_per_minute=100, requests_per_minute=1000)
    assert admitted(limiter, limited) == 0
    clock.now = 60.0
    assert admitted(limiter, limited) == 100


def test_a_refusal_takes_nothing_from_other_levels() -> None:
    limiter = LocalLimiter(Clock())
    tenant, key = (
        subject(requests_per_minute=5),
        Subject("key", UUID(int=2), QuotaLimits(concurrent_requests=0)),
    )
    assert admitted(limiter, tenant, key) == 0
    assert admitted(limiter, tenant) == 5


def test_unused_tokens_and_ended_requests_free_the_share() -> None:
    limiter = LocalLimiter(Clock())
    limited = subject(tokens_per_minute=100, concurrent_requests=1)
    limiter.admit(UUID(int=1), (limited,), 100)
    for _ in range(2):
        limiter.settle(UUID(int=1), 10)
    rate = limiter.admit(UUID(int=2), (limited,), 90).tokens
    assert rate is not None
    assert (rate.limit, rate.remaining) == (100, 0)


def test_each_sequence_of_a_running_request_takes_a_place() -> None:
    limiter, limited = LocalLimiter(Clock()), subject(concurrent_requests=10)
    limiter.admit(UUID(int=1), (limited,), 1, 8)
    with pytest.raises(RateLimited):
        limiter.admit(UUID(int=2), (limited,), 1, 3)
    limiter.admit(UUID(int=3), (limited,), 1, 2)
    for _ in range(2):
        limiter.settle(UUID(int=1), 0)
    limiter.admit(UUID(int=4), (limited,), 1, 8)
    with pytest.raises(QuotaExhausted, match="concurrent_requests"):
        limiter.admit(UUID(int=5), (limited,), 1, 11)


def test_a_request_larger_than_a_share_is_refused() -> None:
    limiter = LocalLimiter(Clock())
    limiter.live_gateways = 2
    with pytest.raises(RateLimited, match="gives out 50"):
        limiter.admit(UUID(int=1), (subject(tokens_per_minute=100),), 51)


def test_a_request_larger_than_the_limit_has_no_retry() -> None:
    limiter = LocalLimiter(Clock())
    key = Subject("key", UUID(int=2), QuotaLimits(concurrent_requests=0))
    for limited, tokens in ((subject(tokens_per_minute=100), 101), (key, 1)):
        with pytest.raises(QuotaExhausted) as refused:
            limiter.admit(UUID(int=1), (limited,), tokens)
        assert refused.value.retry_after_s is None and refused.value.degraded


def test_decisions_are_of_the_shares_and_name_every_limit() -> None:
    limiter = LocalLimiter(Clock())
    limiter.live_gateways = 2
    limited = subject(tokens_per_minute=100, requests_per_minute=2)
    limiter.admit(UUID(int=1), (limited,), 30)
    with pytest.raises(RateLimited):
        limiter.admit(UUID(int=2), (limited,), 10)
    requests, tokens = limiter.decisions((limited,), 10)
    assert (requests.name, requests.limit, requests.used, requests.asked) == (
        "requests_per_minute",
        1,
        1,
        1,
    )
    assert (requests.passed, requests.retry_after_s) == (False, 60.0)
    assert (tokens.limit, tokens.used, tokens.reserved, tokens.asked) == (50, 0, 30, 10)
    assert (tokens.passed, tokens.retry_after_s) == (True, 0.0)
