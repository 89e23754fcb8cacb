"""Limits within their ranges, and what narrows what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.errors import InvalidField
from loraplex.tenants.models import Quota
from loraplex.tenants.models.quotas import LIMIT_COLUMNS
from loraplex.tenants.quotas.limits import COUNTED, MAXIMA, PERIODIC, QuotaLimits, wider


def test_the_limits_are_those_of_the_table() -> None:
    names = [name for name, _ in QuotaLimits().items()]
    assert names == [*LIMIT_COLUMNS] == [*MAXIMA]
    assert COUNTED == LIMIT_COLUMNS[: len(COUNTED)]


@pytest.mark.parametrize("name", LIMIT_COLUMNS)
def test_ranges(name: str) -> None:
    assert QuotaLimits(**{name: MAXIMA[name]}).get(name) == MAXIMA[name]
    for value in (-1, MAXIMA[name] + 1):
        with pytest.raises(InvalidField, match=name) as raised:
            QuotaLimits(**{name: value})
        assert raised.value.field == name


def test_a_row_and_no_row() -> None:
    assert QuotaLimits.of(Quota(tokens_per_day=5, max_keys=2)) == QuotaLimits(tokens_per_day=5, max_keys=2)
    assert QuotaLimits.of(None) == QuotaLimits()


def test_only_days_and_months_need_the_counters() -> None:
    assert not QuotaLimits(
        requests_per_minute=1, tokens_per_minute=1, concurrent_requests=1, max_keys=1
    ).has_periods()
    assert all(QuotaLimits(**{name: 1}).has_periods() for name in PERIODIC)
    assert not QuotaLimits(tokens_per_session=1).has_periods()


VALUES = st.one_of(st.none(), st.integers(0, 3))


@given(
    st.lists(VALUES, min_size=len(LIMIT_COLUMNS), max_size=len(LIMIT_COLUMNS)),
    st.lists(VALUES, min_size=len(LIMIT_COLUMNS), max_size=len(LIMIT_COLUMNS)),
)
def test_narrower_is_never_above(mine: list[int | None], above: list[int | None]) -> None:
    limits = QuotaLimits(**dict(zip(LIMIT_COLUMNS, mine, strict=True)))
    ceiling = QuotaLimits(**dict(zip(LIMIT_COLUMNS, above, strict=True)))
    beyond = {
        name
        for name, value, most in zip(LIMIT_COLUMNS, mine, above, strict=True)
        if value is not None and most is not None and value > most
    }
    assert set(wider(limits, ceiling)) == beyond
