"""A refusal names the limit with the longest wait, and reports the current rates: nothing was taken."""

from datetime import UTC, datetime
from typing import Any

import pytest

from loraplex.tenants.admission.rejections import rate_state, refusal
from loraplex.tenants.counters.counter_replies import Decision, Denied
from loraplex.tenants.errors import QuotaExhausted, RateLimited
from loraplex.tenants.rate_state import Rate, RateState

REQUESTS: dict[str, Any] = {"level": "tenant", "name": "requests_per_minute", "limit": 60}
TOKENS: dict[str, Any] = {"level": "key", "name": "tokens_per_minute", "limit": 120}


def decision(limit: dict[str, Any], used: int, requested: int, retry_after_s: float | None = 0.0) -> Decision:
    """Passed unless it may be tried again later, or never."""
    return Decision(
        **limit,
        used=used,
        reserved=0,
        asked=requested,
        passed=retry_after_s == 0.0,
        retry_after_s=retry_after_s,
    )


def denied(*decisions: Decision) -> Denied:
    return Denied(at=datetime.now(UTC), decisions=decisions, overdue=0)


def test_a_denied_request_takes_nothing_from_a_rate_that_passed() -> None:
    passed, failed = decision(REQUESTS, 10, 1), decision(TOKENS, 100, 50, 15.0)
    error = refusal(denied(passed, failed))
    assert isinstance(error, RateLimited) and not error.degraded
    assert (error.limit, error.level, error.limit_value) == ("tokens_per_minute", "key", 120)
    assert error.rate == RateState(requests=Rate(60, 50, 10.0), tokens=Rate(120, 20, 50.0))
    assert rate_state([passed]) == RateState(requests=Rate(60, 49, 11.0))


def test_the_tightest_level_is_reported() -> None:
    wider = decision({**REQUESTS, "limit": 600}, 0, 1)
    error = refusal(denied(wider, decision({**REQUESTS, "level": "adapter"}, 60, 1, 1.0)))
    assert error.rate == RateState(requests=Rate(60, 0, 60.0))


@pytest.mark.parametrize("used", [0, 30])
def test_a_refusal_by_another_limit_reports_the_rates_too(used: int) -> None:
    budget = {"level": "tenant", "name": "tokens_per_day", "limit": 40}
    error = refusal(denied(decision(REQUESTS, used, 1), decision(budget, 40, 10, 3600.0)))
    assert isinstance(error, QuotaExhausted)
    assert error.rate == RateState(requests=Rate(60, 60 - used, float(used)))


def test_without_a_rate_limit_none_is_reported() -> None:
    concurrent = {"level": "tenant", "name": "concurrent_requests", "limit": 1}
    assert refusal(denied(decision(concurrent, 1, 1, 1.0))).rate == RateState()
