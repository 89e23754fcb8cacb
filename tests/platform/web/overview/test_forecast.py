"""What a month will cost: exact rates of whole days, the range of two windows, and nothing without a whole day of use."""

from datetime import UTC, date, datetime, timedelta

from loraplex.platform.web.overview.queries import SpendForecast, month_forecast

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
TODAY = NOON.date()
LEFT_HOURS = 10 * 24 + 12


def days(last: int, amount: int, until: date = TODAY) -> dict[date, int]:
    """So many days before `until`, each of this amount."""
    return {until - timedelta(days=number): amount for number in range(1, last + 1)}


def test_the_range_is_that_of_the_last_7_and_28_days() -> None:
    month = days(28, 240) | days(7, 480)
    rate_of_28 = (21 * 240 + 7 * 480) * LEFT_HOURS * 3_600_000_000 // (28 * 86_400_000_000)
    assert month_forecast(1000, month, NOON) == SpendForecast(
        1000 + rate_of_28, 1000 + 480 * LEFT_HOURS // 24
    )


def test_the_average_of_a_new_tenant_begins_with_its_first_use() -> None:
    assert month_forecast(72, days(3, 24), NOON) == SpendForecast(72 + LEFT_HOURS, 72 + LEFT_HOURS)
    quiet = {TODAY - timedelta(days=4): 24, TODAY - timedelta(days=1): 0}
    assert month_forecast(24, quiet, NOON) == SpendForecast(24 + LEFT_HOURS // 4, 24 + LEFT_HOURS // 4)


def test_today_is_no_whole_day() -> None:
    assert month_forecast(50, {TODAY: 50}, NOON) is None
    assert month_forecast(0, {}, NOON) is None
    assert month_forecast(74, days(1, 24) | {TODAY: 50}, NOON) == SpendForecast(
        74 + LEFT_HOURS, 74 + LEFT_HOURS
    )


def test_at_the_end_of_a_month_nothing_is_added() -> None:
    end = datetime(2026, 11, 30, 23, 59, 59, 999_999, tzinfo=UTC)
    assert month_forecast(5, days(7, 86_399_999, end.date()), end) == SpendForecast(5, 5)
