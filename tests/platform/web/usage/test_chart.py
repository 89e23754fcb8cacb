"""A chart has every period of its range: zeros where nothing was used, gaps where it has not begun."""

from datetime import UTC, datetime, timedelta

from loraplex.platform.web.usage.chart import usage_chart
from loraplex.platform.web.usage.queries import UsageFilters, UsageGroup, UsagePeriod, UsageReport
from loraplex.tenants.ledger.usage_reports import UsageSums

FIRST, DAY = datetime(2026, 11, 1, tzinfo=UTC), timedelta(days=1)
FILTERS = UsageFilters(
    tenant_id=None, start=FIRST, end=FIRST + 4 * DAY, bucket="1d", group_by=frozenset({"adapter"})
)


def test_days_without_requests_are_zero_and_days_to_come_are_gaps() -> None:
    names = [f"a{number}" for number in range(7)]
    sums = UsageSums(requests=1, amount_pico=7 * 10**6)
    report = UsageReport(
        currency="EUR",
        currencies=("EUR",),
        totals=sums,
        refused=0,
        groups=tuple(
            UsageGroup(id=each, kind="named", name=each, key_name=None, sums=UsageSums(amount_pico=10**6))
            for each in names
        ),
        periods=(UsagePeriod(start=FIRST + DAY, sums=sums, amounts=dict.fromkeys(names, 10**6)),),
    )
    chart = usage_chart(report, FILTERS, names, FIRST + 2.5 * DAY)
    assert [each.name for each in chart.series] == [*names[:4], "other"] and chart.prefix == "€"
    assert [row.values for _, row in chart.periods] == [
        *((0,) * 5, (10**6,) * 4 + (3 * 10**6,), (0,) * 5, (None,) * 5)
    ]
    assert [found for found, _ in chart.periods] == [UsageSums(), sums, UsageSums(), None]
    assert [row.goes_on for _, row in chart.periods] == [False, False, True, False]
    assert chart.totals == (10**6,) * 4 + (3 * 10**6,) and chart.digits == (4,) * 6
