"""Amounts are exact, and the reserved amount is never less than the settled one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.billing.pricing import MAX_PRICE, Price, amount_nano
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.models import billing

TOKENS = st.integers(0, 10**8)


@st.composite
def prices(draw: st.DrawFn) -> Price:
    prompt = draw(st.integers(0, MAX_PRICE))
    cached = draw(st.integers(0, prompt))
    return Price(prompt=prompt, cached_prompt=cached, completion=draw(st.integers(0, MAX_PRICE)))


def test_each_token_is_charged_once() -> None:
    price = Price(prompt=3, cached_prompt=1, completion=10)
    assert price.amount_pico(100, 40, 7) == 60 * 3 + 40 * 1 + 7 * 10


@pytest.mark.parametrize(("pico", "nano"), [(0, 0), (1, 1), (1000, 1), (1001, 2), (10**18 + 1, 10**15 + 1)])
def test_nano_units_are_rounded_up(pico: int, nano: int) -> None:
    assert amount_nano(pico) == nano


@given(prices(), TOKENS, TOKENS, st.data())
def test_the_bound_is_a_bound_and_fits(
    price: Price, prompt: int, completion: int, data: st.DataObject
) -> None:
    cached = data.draw(st.integers(0, prompt))
    generated = data.draw(st.integers(0, completion))
    bound = price.bound_nano(prompt, completion)
    assert amount_nano(price.amount_pico(prompt, cached, generated)) <= bound < 2**53
    assert price.amount_pico(prompt, 0, completion) < 2**63


@pytest.mark.parametrize(
    ("field", "price"),
    [
        ("prompt", {"prompt": -1}),
        ("completion", {"completion": MAX_PRICE + 1}),
        ("cached_prompt", {"prompt": 1, "cached_prompt": 2}),
    ],
)
def test_refused_prices(field: str, price: dict[str, int]) -> None:
    with pytest.raises(InvalidField) as raised:
        Price(**price)
    assert raised.value.field == field


def test_the_tables_bound_prices_likewise() -> None:
    assert billing.MAX_PRICE == MAX_PRICE
