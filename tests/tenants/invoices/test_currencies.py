"""Minor units of currencies, and amounts as text."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.invoices.currencies import MICRO, decimal_text, minor_digits, minor_unit_micro


@pytest.mark.parametrize(
    ("currency", "micro"), [("USD", 10_000), ("EUR", 10_000), ("JPY", MICRO), ("KWD", 1000), ("CLF", 100)]
)
def test_the_minor_unit_has_the_digits_of_iso_4217(currency: str, micro: int) -> None:
    assert minor_unit_micro(currency) == micro
    assert 10 ** minor_digits(currency) * micro == MICRO


@given(st.integers(-(10**15), 10**15), st.sampled_from([0, 2, 3, 4, 6]))
def test_the_text_is_the_amount(units: int, digits: int) -> None:
    text = decimal_text(units * (MICRO // 10**digits), digits)
    assert Fraction(text) == Fraction(units, 10**digits)
    assert len(text.partition(".")[2]) == digits
