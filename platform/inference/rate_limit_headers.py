"""Rate-limit headers: those of the OpenAI API, and the limit and the level that refused a request.

Invariant: no number is below zero, and a quantity without a limit has no header.
"""

import math
from typing import Final

from loraplex.tenants.errors import LimitExceeded, QuotaExhausted, QuotaUnavailable
from loraplex.tenants.rate_state import RateState

MODE_HEADER: Final = "x-ratelimit-mode"
DEGRADED: Final = "degraded"
LIMIT_HEADER: Final = "x-loraplex-limit"
LEVEL_HEADER: Final = "x-loraplex-limit-level"
RETRY_HEADER: Final = "x-should-retry"


def rate_headers(rate: RateState, *, degraded: bool) -> dict[str, str]:
    """Build `x-ratelimit-{limit,remaining,reset}-{requests,tokens}` of the tightest level.

    `degraded`: the numbers are of this gateway's share.
    """
    headers: dict[str, str] = {}
    for name, state in (("requests", rate.requests), ("tokens", rate.tokens)):
        if state is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(state.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, state.remaining))
            headers[f"x-ratelimit-reset-{name}"] = duration_text(state.reset_s)
    return headers | ({MODE_HEADER: DEGRADED} if degraded else {})


def refusal_headers(error: LimitExceeded) -> dict[str, str]:
    """Build the headers of a refusal: its limit, the rates where known, and `x-should-retry: false` where a retry is useless.

    Without that header the SDKs repeat every 429.
    """
    headers = {LIMIT_HEADER: error.limit, LEVEL_HEADER: error.level}
    headers |= rate_headers(error.rate or RateState(), degraded=error.degraded)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    is_useless = error.retry_after_s is None or isinstance(error, QuotaExhausted)
    return headers | ({RETRY_HEADER: "false"} if is_useless else {})


def unavailable_headers(error: QuotaUnavailable) -> dict[str, str]:
    """Build the headers that name the limit whose state is unknown."""
    if error.limit is None or error.level is None:
        return {}
    return {LIMIT_HEADER: error.limit, LEVEL_HEADER: error.level}


def duration_text(seconds: float) -> str:
    """Format a duration as the OpenAI API does: `20ms`, `1.5s`, `6m0s`, `2h0m1s`; rounded up to the millisecond."""
    milliseconds = max(0, math.ceil(seconds * 1000))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    short = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{short}"
    return f"{minutes}m{short}" if minutes else short
