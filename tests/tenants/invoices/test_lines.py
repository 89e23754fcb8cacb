"""Lines are exact sums, rounded once; and what one invoice billed, no later one bills again."""

from fractions import Fraction
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.invoices.lines import (
    CORRECTION,
    PICO_PER_MICRO,
    Charge,
    LineKey,
    UsageSum,
    charges_of,
    half_even,
    minimum_line,
    outstanding_lines,
)
from loraplex.tenants.invoices.months import Month

OCTOBER, NOVEMBER = Month(2026, 10), Month(2026, 11)
SUPPORT, FIRST, SECOND = UUID(int=1), UUID(int=2), UUID(int=3)
PRICES = {
    FIRST: Price(prompt=3, cached_prompt=1, completion=7),
    SECOND: Price(prompt=1_500_000, cached_prompt=150_000, completion=6_000_001, reasoning=9_000_000),
}
TOKENS = st.integers(-(10**9), 10**12)


def used(
    uncached: int = 0,
    cached: int = 0,
    completion: int = 0,
    *,
    reasoning: int = 0,
    month: Month = NOVEMBER,
    adapter: UUID | None = SUPPORT,
    version: UUID | None = FIRST,
    amount: int | None = None,
) -> UsageSum:
    price = Price() if version is None else PRICES[version]
    exact = price.amount_pico(uncached + cached, cached, completion, reasoning)
    return UsageSum(
        month=month,
        adapter_id=adapter,
        price_version_id=version,
        uncached_tokens=uncached,
        cached_tokens=cached,
        completion_tokens=completion,
        reasoning_tokens=reasoning,
        amount_pico=exact if amount is None else amount,
    )


@st.composite
def usage_sums(draw: st.DrawFn) -> UsageSum:
    version = draw(st.sampled_from([None, FIRST, SECOND]))
    return used(
        *(draw(TOKENS), draw(TOKENS), draw(TOKENS)),
        reasoning=draw(TOKENS),
        month=draw(st.sampled_from([OCTOBER, NOVEMBER])),
        adapter=draw(st.sampled_from([None, SUPPORT])),
        version=version,
        amount=draw(st.none() | st.integers(-(10**20), 10**20)),
    )


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**12))
def test_half_even_is_the_rounding_of_exact_fractions(numerator: int, denominator: int) -> None:
    assert half_even(numerator, denominator) == round(Fraction(numerator, denominator))


@pytest.mark.parametrize(
    ("numerator", "rounded"), [(5, 0), (15, 2), (25, 2), (-5, 0), (-15, -2), (-25, -2), (6, 1)]
)
def test_ties_go_to_the_even_neighbour(numerator: int, rounded: int) -> None:
    assert half_even(numerator, 10) == rounded


def test_there_is_one_line_per_adapter_class_and_price_version() -> None:
    sums = [used(5, 3, 2), used(1, 0, 0, version=SECOND), used(4, 0, 0, adapter=None), used(1, 1, 1)]
    lines = outstanding_lines(NOVEMBER, charges_of(sums, PRICES), {}, PRICES)
    rows = [
        (line.adapter_id, line.token_class, line.price_version_id, line.price, line.tokens) for line in lines
    ]
    assert rows == [
        (None, "uncached_prompt", FIRST, 3, 4),
        (SUPPORT, "cached_prompt", FIRST, 1, 4),
        (SUPPORT, "completion", FIRST, 7, 3),
        (SUPPORT, "uncached_prompt", FIRST, 3, 6),
        (SUPPORT, "uncached_prompt", SECOND, 1_500_000, 1),
    ]
    assert {line.kind for line in lines} == {"usage"}


def test_reasoning_is_a_line_of_its_own_at_its_price_or_that_of_a_completion() -> None:
    sums = [used(completion=10, reasoning=4), used(completion=3, reasoning=3, version=SECOND)]
    lines = outstanding_lines(NOVEMBER, charges_of(sums, PRICES), {}, PRICES)
    assert [(line.token_class, line.price, line.tokens, line.amount_pico) for line in lines] == [
        ("completion", 7, 6, 42),
        ("reasoning", 7, 4, 28),
        ("reasoning", 9_000_000, 3, 27_000_000),
    ]


def test_an_amount_without_tokens_is_a_correction_line() -> None:
    lines = outstanding_lines(NOVEMBER, charges_of([used(5, amount=-100)], PRICES), {}, PRICES)
    assert [(line.token_class, line.price, line.tokens, line.amount_pico) for line in lines] == [
        (CORRECTION, None, 0, -115),
        ("uncached_prompt", 3, 5, 15),
    ]


def test_usage_from_before_rate_cards_is_one_line() -> None:
    (line,) = outstanding_lines(
        NOVEMBER, charges_of([used(5, 2, 1, version=None, amount=99)], PRICES), {}, PRICES
    )
    assert (line.token_class, line.price, line.tokens, line.amount_pico) == (CORRECTION, None, 8, 99)


@given(st.lists(usage_sums(), max_size=8))
def test_lines_sum_to_the_usage_and_round_once(sums: list[UsageSum]) -> None:
    lines = outstanding_lines(NOVEMBER, charges_of(sums, PRICES), {}, PRICES)
    assert sum(line.amount_pico for line in lines) == sum(each.amount_pico for each in sums)
    assert sum(line.tokens for line in lines) == sum(
        each.uncached_tokens + each.cached_tokens + each.completion_tokens for each in sums
    )
    for line in lines:
        assert line.amount_micro == round(Fraction(line.amount_pico, PICO_PER_MICRO))
        assert abs(line.rounding_pico) <= PICO_PER_MICRO // 2
        assert line.price is None or line.amount_pico == line.tokens * line.price
    assert len({line.key for line in lines}) == len(lines)


@given(st.lists(usage_sums(), max_size=6), st.lists(usage_sums(), max_size=4))
def test_the_next_invoice_bills_only_what_is_late(first: list[UsageSum], late: list[UsageSum]) -> None:
    billed: dict[LineKey, Charge] = {}
    for usage in (first, [*first, *late]):
        charges = charges_of(usage, PRICES)
        for line in outstanding_lines(NOVEMBER, charges, billed, PRICES):
            assert line.kind == ("usage" if line.month == NOVEMBER else "adjustment")
            assert line.billed == billed.get(line.key, Charge())
            billed[line.key] = line.billed + Charge(line.tokens, line.amount_pico)
        assert outstanding_lines(NOVEMBER, charges, billed, PRICES) == ()
    assert sum(charge.amount_pico for charge in billed.values()) == sum(
        each.amount_pico for each in [*first, *late]
    )


def test_the_minimum_counts_the_usage_of_the_month_alone() -> None:
    sums = [used(10**6, version=SECOND), used(10**6, version=SECOND, month=OCTOBER)]
    lines = outstanding_lines(NOVEMBER, charges_of(sums, PRICES), {}, PRICES)
    assert sum(line.amount_micro for line in lines) == 3_000_000
    rest = minimum_line(NOVEMBER, lines, 2_000_000)
    assert rest is not None
    assert (rest.kind, rest.amount_micro, rest.rounding_pico) == ("minimum", 500_000, 0)
    assert minimum_line(NOVEMBER, lines, 1_500_000) is None
