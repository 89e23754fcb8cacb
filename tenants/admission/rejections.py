"""What a caller gets of a decision of the counters: the tightest rates, or an error that names the limit; never a secret."""

from collections.abc import Sequence
from dataclasses import replace

from loraplex.tenants.counters.counter_replies import Decision, Denied, UnknownLimit
from loraplex.tenants.errors import LimitExceeded, QuotaExhausted, RateLimited
from loraplex.tenants.quotas.limits import BUDGETS, NANO_PER_MICRO, PER_SESSION, LimitName
from loraplex.tenants.quotas.reservation import LimitAtAdmission, ReservationRequest
from loraplex.tenants.rate_state import Rate, RateState


def rate_state(decisions: Sequence[Decision]) -> RateState:
    """The tightest rates of all levels."""
    return RateState(_tightest(decisions, "requests_per_minute"), _tightest(decisions, "tokens_per_minute"))


def met_limits(decisions: Sequence[Decision]) -> tuple[LimitAtAdmission, ...]:
    """What an admitted request met of every limit, to be kept with its record."""
    return tuple(
        [
            LimitAtAdmission(each.level, each.name, each.limit, each.used, each.reserved, each.asked)
            for each in decisions
        ]
    )


def refusal(denied: Denied) -> LimitExceeded:
    """The error for the failed limit with the longest wait."""
    return limit_error(denied.deciding, denied.decisions)


def limit_error(decision: Decision, tested: Sequence[Decision]) -> LimitExceeded:
    """The error for one failed limit. `tested`: the limits whose rates it reports."""
    kind = QuotaExhausted if decision.exhausted else RateLimited
    unit = " micro-units" if decision.name.startswith("budget") else ""
    return kind(
        f"{decision.name} of the {decision.level} is {decision.limit}{unit}: {decision.used} used, "
        f"{decision.reserved} reserved, {decision.asked} requested",
        limit=decision.name,
        level=decision.level,
        limit_value=decision.limit,
        retry_after_s=decision.retry_after_s,
        # A denied request takes nothing, not even from the limits that it passed.
        rate=rate_state([replace(each, asked=0) for each in tested]),
    )


def unknown_limits(request: ReservationRequest, names: Sequence[LimitName]) -> tuple[UnknownLimit, ...]:
    """The limits of the request's subjects with one of these names, and the amount that the request needs of each."""
    amounts: dict[str, int] = {
        "requests_per_minute": 1,
        "concurrent_requests": request.sequences,
    }
    amounts |= dict.fromkeys(BUDGETS, -(-request.amount_nano // NANO_PER_MICRO))
    return tuple(
        UnknownLimit(level=subject.level, name=name, limit=limit, asked=amounts.get(name, request.tokens))
        for subject in request.subjects
        for name in names
        if (limit := subject.limits.get(name)) is not None and (name != PER_SESSION or request.counts_session)
    )


def _tightest(decisions: Sequence[Decision], name: str) -> Rate | None:
    rates = [
        Rate(decision.limit, decision.remaining, decision.reset_s or 0.0)
        for decision in decisions
        if decision.name == name
    ]
    return min(rates, key=lambda rate: rate.remaining, default=None)
