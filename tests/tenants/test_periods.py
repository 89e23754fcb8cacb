"""Days and months of UTC."""

from datetime import UTC, datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.periods import Periods, period_end, period_start, periods_around, periods_of

TIMES = st.datetimes(datetime(1971, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC))


def test_names() -> None:
    assert periods_of(datetime(2026, 3, 1, tzinfo=UTC)) == Periods("d:2026-03-01", "m:2026-03")


def test_periods_are_those_of_utc() -> None:
    east = timezone(timedelta(hours=5))
    assert periods_of(datetime(2027, 1, 1, 4, 59, tzinfo=east)) == Periods("d:2026-12-31", "m:2026-12")


@given(TIMES)
def test_a_moment_is_in_its_periods_and_the_next_begins_at_their_end(time: datetime) -> None:
    periods = periods_of(time)
    for period in (periods.day, periods.month):
        assert period_start(period) <= time < period_end(period)
    assert periods_of(period_end(periods.day) - timedelta(microseconds=1)).day == periods.day
    assert periods_of(period_end(periods.month) - timedelta(microseconds=1)).month == periods.month
    assert periods_of(period_end(periods.month)).month != periods.month


@given(TIMES, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))
def test_a_clock_that_differs_by_less_than_a_day_is_around(time: datetime, difference: timedelta) -> None:
    around = periods_around(time)
    other = periods_of(time + difference)
    assert len(set(around)) == 6
    assert {other.day, other.month} <= set(around)
