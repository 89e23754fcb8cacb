"""The most that one request may reserve: what the default maximum of a request that names none is lowered to.

Invariant: what is used of a limit lowers it only where the period's end alone would help, so that equal requests get equal maxima.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from loraplex.tenants.billing.pricing import PriceVersion
from loraplex.tenants.counters.counter_replies import LimitUse
from loraplex.tenants.quotas.limits import (
    BUDGETS,
    NANO_PER_MICRO,
    PER_SESSION,
    PERIODIC,
    QuotaLimits,
    Subject,
)

TOKEN_TOTALS = (*(name for name in PERIODIC if name not in BUDGETS), PER_SESSION)


@dataclass(frozen=True, slots=True)
class CompletionAllowance:
    """`default_max_tokens`: the tenant's own, None where its tier or the installation sets it. `completion_tokens`: the most of all
    sequences that the limits can admit beside the prompts; None without such a limit, below 1 where they admit none.
    `unknown_parameters`: the tenant's own choice.
    """

    default_max_tokens: int | None
    completion_tokens: int | None
    unknown_parameters: str = "default"


def within(subject: Subject, uses: Iterable[LimitUse], *, in_session: bool = False) -> QuotaLimits:
    """The limits of a subject, those of days, months and, for a request `in_session`, of its session less what `uses` says is used
    of them. What open requests have reserved comes back.
    """
    left: dict[str, int | None] = {
        each.name: max(0, each.limit - each.used)
        for each in uses
        if each.subject_id == subject.id and each.name in (*PERIODIC, PER_SESSION) and each.limit is not None
    }
    return replace(subject.limits, **left if in_session else left | {PER_SESSION: None})


def completion_tokens_within(
    limits: Sequence[QuotaLimits],
    prompt_tokens: int,
    share: Callable[[int], int],
    prices: Callable[[], Sequence[PriceVersion]],
) -> int | None:
    """The most completion tokens beside these prompts that all `limits` can admit; None for any number.

    `share`: the part of a rate that is given out at once. `prices`: those that may apply, asked only where money is limited.
    """
    tokens = [each.get(name) for each in limits for name in TOKEN_TOTALS]
    tokens += [None if each.tokens_per_minute is None else share(each.tokens_per_minute) for each in limits]
    rooms = [limit - prompt_tokens for limit in tokens if limit is not None]
    budgets = [budget for each in limits for name in BUDGETS if (budget := each.get(name)) is not None]
    if budgets:
        nano = min(budgets) * NANO_PER_MICRO
        bought = [each.price.completion_tokens_within(nano, prompt_tokens) for each in prices()]
        rooms += [each for each in bought if each is not None]
    return min(rooms, default=None)
