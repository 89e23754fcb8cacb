"""What the counters' decisions mean to the caller: the tightest rates, or the limit that refused. Nothing secret is told."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from loraplex.tenants.counters.counter_replies import Decision, Denied, Explanation, UnknownLimit
from loraplex.tenants.errors import LimitExceeded, QuotaExhausted, RateLimited
from loraplex.tenants.quotas.limits import BUDGETS, NANO_PER_MICRO, LimitName
from loraplex.tenants.quotas.reservation import CounterReservation
from loraplex.tenants.rate_state import Rate, RateState


def rate_state(decisions: Sequence[Decision]) -> RateState:
    return RateState(_tightest(decisions, "requests_per_minute"), _tightest(decisions, "tokens_per_minute"))


def refusal(denied: Denied) -> LimitExceeded:
    """The error for the limit that holds longest."""
    decision = denied.deciding
    kind = QuotaExhausted if denied.exhausted else RateLimited
    unit = " micro-units" if decision.name.startswith("budget") else ""
    return kind(
        f"{decision.name} of the {decision.level} is {decision.limit}{unit}: {decision.used} used, "
        f"{decision.reserved} reserved, {decision.asked} asked",
        limit=decision.name,
        level=decision.level,
        limit_value=decision.limit,
        retry_after_s=decision.retry_after_s,
        # Nothing was taken, not even of the limits that it would have passed.
        rate=rate_state([replace(each, asked=0) for each in denied.decisions]),
    )


def degraded_denial(
    asked: CounterReservation,
    at: datetime,
    *,
    decisions: tuple[Decision, ...] = (),
    untold: tuple[UnknownLimit, ...] = (),
) -> Explanation:
    return Explanation(request_id=asked.request_id, at=at, decisions=decisions, untold=untold, degraded=True)


def untold_limits(asked: CounterReservation, names: Sequence[LimitName]) -> tuple[UnknownLimit, ...]:
    """Those of its subjects' limits that have one of these names, and what the request asked of each."""
    amounts: dict[str, int] = {"requests_per_minute": 1, "concurrent_requests": 1}
    amounts |= dict.fromkeys(BUDGETS, -(-asked.amount_nano // NANO_PER_MICRO))
    return tuple(
        UnknownLimit(level=subject.level, name=name, limit=limit, asked=amounts.get(name, asked.tokens))
        for subject in asked.subjects
        for name in names
        if (limit := subject.limits.get(name)) is not None
    )


def _tightest(decisions: Sequence[Decision], name: str) -> Rate | None:
    rates = [
        Rate(decision.limit, decision.remaining, decision.reset_s or 0.0)
        for decision in decisions
        if decision.name == name
    ]
    return min(rates, key=lambda rate: rate.remaining, default=None)
