"""What the tokens that were served have cost: the price of the accelerators' hours over the tokens of the rollups.

Invariant: integers only. Costs are micro-units of money, rounded half up; what was charged is exact, in pico-units.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.ledger.usage_reports import UsageQuery, UsageSums, usage_totals

MILLION: Final = 1_000_000
PICO_PER_MICRO: Final = 1_000_000
MICROSECOND: Final = timedelta(microseconds=1)
HOUR: Final = timedelta(hours=1) // MICROSECOND


@dataclass(frozen=True, slots=True)
class AcceleratorPrice:
    """What all accelerators of the installation cost per hour, in micro-units of `currency`."""

    micro_per_hour: int
    currency: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost:
    """Cost and revenue from `start` to `end`. Accelerators cost the same whether they serve or not.

    `sums`: usage in the currency of the price. `tokens`: prompt and response tokens of all currencies. `cost_micro`: of the
    accelerators. `other_currencies`: those of usage that `sums` leaves out, with which no margin can be given.
    """

    start: datetime
    end: datetime
    price: AcceleratorPrice
    cost_micro: int
    tokens: int
    sums: UsageSums
    other_currencies: tuple[str, ...]

    @property
    def cost_per_million_micro(self) -> int | None:
        """Micro-units per million tokens; None without tokens."""
        return _divided(self.cost_micro * MILLION, self.tokens) if self.tokens else None

    @property
    def price_per_million_micro(self) -> int | None:
        """What a million tokens were charged on average; None without tokens, or with several currencies."""
        if not self.tokens or self.other_currencies:
            return None
        return _divided(self.sums.amount_pico, self.tokens)

    @property
    def margin_micro(self) -> int | None:
        """What was charged beyond the cost; None with several currencies."""
        if self.other_currencies:
            return None
        return _divided(self.sums.amount_pico, PICO_PER_MICRO) - self.cost_micro


async def serving_cost(
    session: AsyncSession, price: AcceleratorPrice, start: datetime, end: datetime, now: datetime
) -> ServingCost:
    """The cost of a range of whole hours, as an operator reads it. Hours after `now` cost nothing yet."""
    query = UsageQuery(tenant_id=None, start=start, end=end, bucket="1h", group_by=frozenset())
    totals = await usage_totals(session, query)
    passed = max(min(end, now) - start, timedelta()) // MICROSECOND
    return ServingCost(
        start=start,
        end=end,
        price=price,
        cost_micro=_divided(price.micro_per_hour * passed, HOUR),
        tokens=sum(each.prompt_tokens + each.completion_tokens for each in totals.values()),
        sums=totals.get(price.currency, UsageSums()),
        other_currencies=tuple(sorted(totals.keys() - {price.currency})),
    )


def cost_per_million(micro_per_hour: int, tokens: int, microseconds: int) -> int:
    """Micro-units per million tokens, of a machine that takes so long for so many tokens; both above 0."""
    return _divided(micro_per_hour * microseconds * MILLION, tokens * HOUR)


def _divided(amount: int, by: int) -> int:
    """Rounded half up."""
    return (2 * amount + by) // (2 * by)
