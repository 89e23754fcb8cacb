"""From sums of usage to the lines of an invoice: one per adapter, token class and price version.

Invariant: amounts are exact pico-units until a line rounds its own once, half to even, to micro-units. A line bills what its
month has used less what earlier invoices billed of it, so usage that arrives late is billed once, by the next invoice.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Literal, Self
from uuid import UUID

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.invoices.months import Month

PICO_PER_MICRO: Final = 1_000_000
TOKEN_CLASSES: Final = ("uncached_prompt", "cached_prompt", "completion", "reasoning")
"""Disjoint: every token of a request is in one of them."""
CORRECTION: Final = "correction"
"""The class of an amount that no tokens explain: of corrections, and of usage from before rate cards."""

LineKind = Literal["usage", "adjustment", "minimum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSum:
    """What requests of one month used of one adapter (None: the base model) under one price version (None: none).

    `completion_tokens` includes `reasoning_tokens`, as rows of the ledger do.
    """

    month: Month
    adapter_id: UUID | None
    price_version_id: UUID | None
    uncached_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    amount_pico: int

    @classmethod
    def of(cls, month: Month, adapter_id: UUID | None, version: UUID | None, *amounts: int | Decimal) -> Self:
        """The sum with these amounts, in the order of its fields: sums of PostgreSQL are numeric, exact integers of any size."""
        uncached, cached, completion, reasoning, pico = map(int, amounts)
        return cls(
            month=month,
            adapter_id=adapter_id,
            price_version_id=version,
            uncached_tokens=uncached,
            cached_tokens=cached,
            completion_tokens=completion,
            reasoning_tokens=reasoning,
            amount_pico=pico,
        )


@dataclass(frozen=True, slots=True)
class LineKey:
    """What makes one line of an invoice."""

    month: Month
    adapter_id: UUID | None
    price_version_id: UUID | None
    token_class: str

    @property
    def order(self) -> tuple[Month, str, str, str]:
        """The place of the line on the invoice; the base model is first."""
        return self.month, str(self.adapter_id or ""), self.token_class, str(self.price_version_id or "")


@dataclass(frozen=True, slots=True)
class Charge:
    """Tokens, and their exact amount; both are negative where corrections outweigh usage."""

    tokens: int = 0
    amount_pico: int = 0

    def __add__(self, other: "Charge") -> "Charge":
        return Charge(self.tokens + other.tokens, self.amount_pico + other.amount_pico)

    def __sub__(self, other: "Charge") -> "Charge":
        return Charge(self.tokens - other.tokens, self.amount_pico - other.amount_pico)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceLine:
    """One line. `kind`: `usage` of the invoice's month, `adjustment` of an earlier one, or the rest up to the `minimum`.

    `month`: when the tokens were used. `price`: micro-units per million tokens; None where tokens do not explain the amount.
    `billed`: what earlier invoices billed under the same key; the line has only the difference.
    """

    kind: LineKind
    month: Month
    adapter_id: UUID | None
    token_class: str | None
    price_version_id: UUID | None
    price: int | None
    tokens: int
    amount_pico: int
    amount_micro: int
    billed: Charge = Charge()

    @property
    def rounding_pico(self) -> int:
        """What rounding added; from -500,000 to 500,000."""
        return self.amount_micro * PICO_PER_MICRO - self.amount_pico

    @property
    def key(self) -> LineKey:
        """The key of a usage or adjustment line. Raises `ValueError` for another one."""
        if self.token_class is None:
            raise ValueError(f"a line {self.kind} has no token class")
        return LineKey(self.month, self.adapter_id, self.price_version_id, self.token_class)


def half_even(numerator: int, denominator: int) -> int:
    """Divide integers and round to the nearest, ties to the even quotient. `denominator` must be positive."""
    quotient, rest = divmod(numerator, denominator)
    above = 2 * rest - denominator
    return quotient + (above > 0 or (above == 0 and quotient % 2 == 1))


def charges_of(sums: Iterable[UsageSum], prices: Mapping[UUID, Price]) -> dict[LineKey, Charge]:
    """Split sums by token class. What the prices of a sum's version do not explain of its amount is a correction."""
    charges: dict[LineKey, Charge] = {}
    for each in sums:
        price = Price() if each.price_version_id is None else prices[each.price_version_id]
        for token_class, charge in _by_class(each, price).items():
            key = LineKey(each.month, each.adapter_id, each.price_version_id, token_class)
            charges[key] = charges.get(key, Charge()) + charge
    return charges


def _by_class(used: UsageSum, price: Price) -> dict[str, Charge]:
    answer = used.completion_tokens - used.reasoning_tokens
    tokens = (used.uncached_tokens, used.cached_tokens, answer, used.reasoning_tokens)
    if used.price_version_id is None:
        return {CORRECTION: Charge(sum(tokens), used.amount_pico)}
    each_class = zip(TOKEN_CLASSES, tokens, prices_by_class(price), strict=True)
    charges = {name: Charge(count, count * unit) for name, count, unit in each_class}
    explained = sum(charge.amount_pico for charge in charges.values())
    return charges | {CORRECTION: Charge(0, used.amount_pico - explained)}


def prices_by_class(price: Price) -> tuple[int, int, int, int]:
    """Return the prices in the order of `TOKEN_CLASSES`."""
    return price.prompt, price.cached_prompt, price.completion, price.of_reasoning


def outstanding_lines(
    month: Month,
    charges: Mapping[LineKey, Charge],
    billed: Mapping[LineKey, Charge],
    prices: Mapping[UUID, Price],
) -> tuple[InvoiceLine, ...]:
    """Return the lines of the invoice of `month`: `charges` of it and of earlier months, less what is `billed`."""
    lines = []
    for key in sorted(charges.keys() | billed.keys(), key=lambda each: each.order):
        before = billed.get(key, Charge())
        due = charges.get(key, Charge()) - before
        if due != Charge():
            lines.append(_line(month, key, due, before, prices))
    return tuple(lines)


def _line(
    month: Month, key: LineKey, due: Charge, billed: Charge, prices: Mapping[UUID, Price]
) -> InvoiceLine:
    return InvoiceLine(
        kind="usage" if key.month == month else "adjustment",
        month=key.month,
        adapter_id=key.adapter_id,
        token_class=key.token_class,
        price_version_id=key.price_version_id,
        price=unit_price(key, prices),
        tokens=due.tokens,
        amount_pico=due.amount_pico,
        amount_micro=half_even(due.amount_pico, PICO_PER_MICRO),
        billed=billed,
    )


def unit_price(key: LineKey, prices: Mapping[UUID, Price]) -> int | None:
    """Return the micro-units per million tokens of a line; None for a correction."""
    if key.price_version_id is None or key.token_class == CORRECTION:
        return None
    return prices_by_class(prices[key.price_version_id])[TOKEN_CLASSES.index(key.token_class)]


def billed_micro(month: Month, billed: Mapping[LineKey, Charge]) -> int:
    """Return what other invoices billed of the month, in micro-units."""
    return sum(
        half_even(charge.amount_pico, PICO_PER_MICRO) for key, charge in billed.items() if key.month == month
    )


def minimum_line(
    month: Month, lines: Iterable[InvoiceLine], minimum_micro: int, billed_micro: int = 0
) -> InvoiceLine | None:
    """Return the rest up to the tenant's minimum, None where the month's own usage reaches it, with what other invoices billed
    of it. Adjustments of earlier months do not count: their months had a minimum of their own. Nor does the minimum take back
    a correction.
    """
    used_micro = billed_micro + sum(line.amount_micro for line in lines if line.kind == "usage")
    missing = minimum_micro - max(0, used_micro)
    if missing <= 0:
        return None
    return InvoiceLine(
        kind="minimum",
        month=month,
        adapter_id=None,
        token_class=None,
        price_version_id=None,
        price=None,
        tokens=0,
        amount_pico=missing * PICO_PER_MICRO,
        amount_micro=missing,
    )
