"""Amounts are exact, and the reserved amount is never less than the settled one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.billing.pricing import MAX_PRICE, Price, amount_nano
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.models import billing
from loraplex.tenants.quotas.reservation import SettledUsage

TOKENS = st.integers(0, 10**8)


@st.composite
def prices(draw: st.DrawFn) -> Price:
    prompt = draw(st.integers(0, MAX_PRICE))
    cached = draw(st.integers(0, prompt))
    own = st.integers(0, MAX_PRICE)
    return Price(prompt=prompt, cached_prompt=cached, completion=draw(own), reasoning=draw(st.none() | own))


def test_each_token_is_charged_once() -> None:
    price = Price(prompt=3, cached_prompt=1, completion=10)
    assert price.amount_pico(100, 40, 7) == price.amount_pico(100, 40, 7, 5) == 60 * 3 + 40 * 1 + 7 * 10
    for reasoning in (0, 4, 25):
        thinking = Price(prompt=3, cached_prompt=1, completion=10, reasoning=reasoning)
        assert thinking.amount_pico(100, 40, 7, 5) == 60 * 3 + 40 * 1 + 2 * 10 + 5 * reasoning
        assert thinking.bound_nano(0, 1000) == max(10, reasoning)


@given(prices(), TOKENS, TOKENS, st.data())
def test_an_amount_is_the_sum_over_its_tokens(
    price: Price, prompt: int, completion: int, data: st.DataObject
) -> None:
    cached, reasoning = data.draw(st.integers(0, prompt)), data.draw(st.integers(0, completion))
    by_hand = (
        (prompt - cached) * price.prompt
        + cached * price.cached_prompt
        + (completion - reasoning) * price.completion
        + reasoning * (price.completion if price.reasoning is None else price.reasoning)
    )
    assert price.amount_pico(prompt, cached, completion, reasoning) == by_hand
    usage = SettledUsage(
        outcome="completed",
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        reasoning_tokens=reasoning,
    )
    assert usage.cost_pico(price) == by_hand
    least = price.bound_nano(prompt, completion)
    fits = price.completion_tokens_within(least, prompt)
    assert fits is None or fits >= completion
    fewer = price.completion_tokens_within(least - 2, prompt)
    assert fewer is None or fewer < completion or not price.dearest_completion or completion == 0


@pytest.mark.parametrize(("pico", "nano"), [(0, 0), (1, 1), (1000, 1), (1001, 2), (10**18 + 1, 10**15 + 1)])
def test_nano_units_are_rounded_up(pico: int, nano: int) -> None:
    assert amount_nano(pico) == nano


@given(prices(), TOKENS, TOKENS, st.data())
def test_the_bound_is_a_bound_and_fits(
    price: Price, prompt: int, completion: int, data: st.DataObject
) -> None:
    cached = data.draw(st.integers(0, prompt))
    generated = data.draw(st.integers(0, completion))
    reasoned = data.draw(st.integers(0, generated))
    bound = price.bound_nano(prompt, completion)
    assert amount_nano(price.amount_pico(prompt, cached, generated, reasoned)) <= bound < 2**53
    assert price.amount_pico(prompt, 0, completion, reasoned) < 2**63


@pytest.mark.parametrize(
    ("field", "price"),
    [
        ("prompt", {"prompt": -1}),
        ("completion", {"completion": MAX_PRICE + 1}),
        ("reasoning", {"reasoning": MAX_PRICE + 1}),
        ("reasoning", {"reasoning": -1}),
        ("cached_prompt", {"prompt": 1, "cached_prompt": 2}),
    ],
)
def test_refused_prices(field: str, price: dict[str, int]) -> None:
    with pytest.raises(InvalidField) as raised:
        Price(**price)
    assert raised.value.field == field


def test_the_tables_bound_prices_likewise() -> None:
    assert billing.MAX_PRICE == MAX_PRICE
