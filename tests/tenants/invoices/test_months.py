"""Months begin and end at midnight UTC."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from loraplex.tenants.errors import InvalidField
from loraplex.tenants.invoices.months import Month


def test_a_month_ends_where_the_next_begins() -> None:
    december = Month.parse("2026-12")
    assert december.begin == datetime(2026, 12, 1, tzinfo=UTC)
    assert december.end == datetime(2027, 1, 1, tzinfo=UTC)
    assert december.previous == Month(2026, 11) < december
    assert Month(2027, 1).previous == december
    assert str(Month(2027, 1)) == "2027-01"


def test_the_month_of_a_time_is_that_of_utc() -> None:
    tokyo = timezone(timedelta(hours=9))
    assert Month.of(datetime(2026, 12, 1, 8, 59, tzinfo=tokyo)) == Month(2026, 11)
    assert Month.of(datetime(2026, 12, 1, 9, 0, tzinfo=tokyo)) == Month(2026, 12)


@pytest.mark.parametrize(
    "text", ["", "2026-13", "2026-00", "2026-1", "1999-12", "2026-10-01", "٢٠٢٦-10", "2026-10\n"]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidField, match="YYYY-MM"):
        Month.parse(text)
