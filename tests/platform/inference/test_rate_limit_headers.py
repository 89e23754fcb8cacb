"""Rate-limit headers: the OpenAI API's names and durations, whole seconds, no number below zero."""

import pytest

from loraplex.platform.inference.rate_limit_headers import (
    duration_text,
    rate_headers,
    refusal_headers,
    unavailable_headers,
)
from loraplex.tenants.errors import QuotaExhausted, QuotaUnavailable, RateLimited
from loraplex.tenants.rate_state import Rate, RateState


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (-1, "0ms"),
        (0.0201, "21ms"),
        (0.9999, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (7201.25, "2h0m1.25s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_quantity_without_a_limit_has_no_header() -> None:
    assert rate_headers(RateState(requests=None, tokens=None), degraded=False) == {}
    assert rate_headers(RateState(requests=None, tokens=None), degraded=True) == {
        "x-ratelimit-mode": "degraded"
    }
    assert rate_headers(RateState(requests=Rate(60, -3, 1), tokens=None), degraded=False) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1s",
    }


def test_a_refusal_names_its_limit_and_whether_to_retry() -> None:
    limited = RateLimited(
        "slow down", limit="tokens_per_minute", level="key", limit_value=100, retry_after_s=1.2
    )
    assert refusal_headers(limited) == {
        "x-loraplex-limit": "tokens_per_minute",
        "x-loraplex-limit-level": "key",
        "retry-after": "2",
    }
    hopeless = RateLimited("no", limit="tokens_per_minute", level="key", limit_value=1, retry_after_s=None)
    assert refusal_headers(hopeless) == {
        "x-loraplex-limit": "tokens_per_minute",
        "x-loraplex-limit-level": "key",
        "x-should-retry": "false",
    }
    degraded = RateLimited(
        "no", limit="concurrent_requests", level="key", limit_value=1, retry_after_s=1, degraded=True
    )
    assert refusal_headers(degraded)["x-ratelimit-mode"] == "degraded"
    spent = QuotaExhausted("spent", limit="budget_per_day", level="tenant", limit_value=1, retry_after_s=None)
    assert refusal_headers(spent) == {
        "x-loraplex-limit": "budget_per_day",
        "x-loraplex-limit-level": "tenant",
        "x-should-retry": "false",
    }


@pytest.mark.parametrize("degraded", [False, True])
def test_a_refusal_has_the_known_rates(degraded: bool) -> None:
    limited = RateLimited(
        "slow down",
        limit="tokens_per_minute",
        level="key",
        limit_value=100,
        retry_after_s=30.0,
        rate=RateState(requests=None, tokens=Rate(100, 12, 52.8)),
        degraded=degraded,
    )
    expected = {
        "x-loraplex-limit": "tokens_per_minute",
        "x-loraplex-limit-level": "key",
        "retry-after": "30",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "12",
        "x-ratelimit-reset-tokens": "52.8s",
    }
    assert refusal_headers(limited) == expected | ({"x-ratelimit-mode": "degraded"} if degraded else {})


def test_a_limit_with_unknown_state_is_named() -> None:
    assert unavailable_headers(QuotaUnavailable("later")) == {}
    assert unavailable_headers(QuotaUnavailable("later", limit="tokens_per_day", level="adapter")) == {
        "x-loraplex-limit": "tokens_per_day",
        "x-loraplex-limit-level": "adapter",
    }
