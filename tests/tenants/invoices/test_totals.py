"""Credits come before tax, in their order and never below zero; each step of the sum rounds once."""

from datetime import UTC, datetime, timedelta
from fractions import Fraction
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.invoices.currencies import minor_unit_micro
from loraplex.tenants.invoices.lines import InvoiceLine
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.totals import (
    CreditBalance,
    CreditUse,
    InvoiceTerms,
    burn,
    total_invoice,
)

NOVEMBER = Month(2026, 11)
NOON = datetime(2026, 10, 5, 12, tzinfo=UTC)


def terms(currency: str = "USD", tax: int = 0, minimum: int = 0) -> InvoiceTerms:
    return InvoiceTerms(
        currency=currency,
        issuer="Serving Ltd",
        customer_name="acme",
        customer_address="1 Main Street",
        vat_id=None,
        tax_rate_ppm=tax,
        minimum_micro=minimum,
    )


def line(micro: int) -> InvoiceLine:
    return InvoiceLine(
        kind="usage",
        month=NOVEMBER,
        adapter_id=None,
        token_class="correction",
        price_version_id=None,
        price=None,
        tokens=0,
        amount_pico=micro * 1_000_000,
        amount_micro=micro,
    )


def credit(
    number: int, available: int, priority: int = 50, expires: datetime | None = None, days: int = 0
) -> CreditBalance:
    return CreditBalance(
        grant_id=UUID(int=number),
        priority=priority,
        expires_at=expires,
        granted_at=NOON + timedelta(days=days),
        available_micro=available,
    )


CREDITS = st.lists(
    st.builds(
        credit,
        st.integers(0, 2**64),
        st.integers(0, 10**9),
        st.integers(0, 3),
        st.none() | st.sampled_from([NOVEMBER.end, NOVEMBER.end - timedelta(seconds=1)]),
        st.integers(0, 3),
    ),
    max_size=6,
    unique_by=lambda each: each.grant_id,
)


def test_credits_burn_by_priority_then_expiry_then_age() -> None:
    soon, later = NOVEMBER.end, NOVEMBER.end + timedelta(days=1)
    order = [
        credit(9, 1, priority=0),
        credit(8, 1, expires=soon, days=9),
        credit(7, 1, expires=later, days=1),
        credit(6, 1, expires=later, days=2),
        credit(5, 1, days=1),
        credit(4, 1, days=2),
        credit(3, 1, priority=51, expires=soon),
    ]
    assert burn(NOVEMBER, reversed(order), 7) == tuple(CreditUse(each.grant_id, 1) for each in order)


def test_a_grant_pays_for_months_that_end_before_it_expires() -> None:
    ended = credit(1, 10, expires=NOVEMBER.end - timedelta(microseconds=1))
    assert burn(NOVEMBER, [ended], 10) == ()
    assert burn(Month(2026, 10), [ended], 10) == (CreditUse(ended.grant_id, 10),)


def test_credits_come_before_tax_and_the_rounding_is_shown() -> None:
    totals = total_invoice(NOVEMBER, [line(10_004_321)], [credit(1, 4_000_000)], terms(tax=190_000))
    assert (totals.subtotal_micro, totals.credits_micro) == (10_004_321, 4_000_000)
    assert totals.tax_micro == 1_140_821
    assert (totals.rounding_micro, totals.total_micro) == (4858, 7_150_000)


@pytest.mark.parametrize(
    ("currency", "total"), [("JPY", 12_000_000), ("KWD", 12_346_000), ("CLF", 12_345_700)]
)
def test_the_total_is_in_the_minor_unit_of_the_currency(currency: str, total: int) -> None:
    totals = total_invoice(NOVEMBER, [line(12_345_678)], [], terms(currency))
    assert totals.total_micro == total
    assert totals.rounding_micro == total - 12_345_678


def test_a_negative_sum_takes_no_credits_and_is_owed_to_the_tenant() -> None:
    totals = total_invoice(NOVEMBER, [line(-1_000_000)], [credit(1, 500)], terms(tax=200_000))
    assert (totals.credit_uses, totals.tax_micro, totals.total_micro) == ((), -200_000, -1_200_000)


@given(
    st.lists(st.integers(-(10**12), 10**12), max_size=5),
    CREDITS,
    st.integers(0, 1_000_000),
    st.integers(0, 10**10),
    st.sampled_from(["USD", "JPY", "KWD", "CLF"]),
)
def test_the_sum_is_exact_and_each_step_rounds_once(
    amounts: list[int], credits: list[CreditBalance], tax: int, minimum: int, currency: str
) -> None:
    totals = total_invoice(NOVEMBER, [line(each) for each in amounts], credits, terms(currency, tax, minimum))
    assert totals.subtotal_micro == sum(amounts) + max(0, minimum - max(0, sum(amounts)))
    taxable = totals.subtotal_micro - totals.credits_micro
    assert 0 <= totals.credits_micro <= max(0, totals.subtotal_micro)
    assert totals.tax_micro == round(Fraction(taxable * tax, 1_000_000))
    minor = minor_unit_micro(currency)
    assert totals.total_micro == round(Fraction(taxable + totals.tax_micro, minor)) * minor
    available = {each.grant_id: each.available_micro for each in credits}
    assert all(0 < use.amount_micro <= available[use.grant_id] for use in totals.credit_uses)


@given(CREDITS, st.integers(-10, 10**10))
def test_a_later_credit_is_used_only_when_the_earlier_ones_are_used_up(
    credits: list[CreditBalance], amount: int
) -> None:
    uses = {use.grant_id: use.amount_micro for use in burn(NOVEMBER, credits, amount)}
    usable = [each for each in credits if each.expires_at is None or each.expires_at >= NOVEMBER.end]
    assert sum(uses.values()) == max(0, min(amount, sum(each.available_micro for each in usable)))
    left_over = False
    for each in sorted(usable, key=lambda one: one.burn_order):
        assert not (left_over and each.grant_id in uses)
        left_over = left_over or uses.get(each.grant_id, 0) < each.available_micro
