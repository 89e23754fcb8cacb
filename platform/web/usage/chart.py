"""What the usage pages draw: a report as series and periods, with the table of the same numbers.

Invariant: every period of the range has a row: zeros where nothing was used, gaps where it has not begun.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from loraplex.platform.web.console.charts import MAX_SERIES, ChartRow, Series, named, symbol
from loraplex.platform.web.console.formatting import sum_digits
from loraplex.platform.web.usage.queries import UsageFilters, UsageReport
from loraplex.tenants.ledger.usage_reports import UsageSums


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageChart:
    """`periods`: the sums of each, None where it has not begun, and its amounts by series, in pico-units. `totals`: of the series.
    `digits`: decimals of the columns of amounts, the last one that of all series. `prefix`: what stands before an amount.
    """

    series: tuple[Series, ...]
    periods: tuple[tuple[UsageSums | None, ChartRow], ...]
    totals: tuple[int, ...]
    digits: tuple[int, ...]
    prefix: str


def usage_chart(
    report: UsageReport, filters: UsageFilters, names: Sequence[str], now: datetime
) -> UsageChart:
    """Draw a report by the hour or by the day. `names`: those of its groups, in their order."""
    own = len(names) if len(names) <= MAX_SERIES else MAX_SERIES - 1
    ids = [group.id for group in report.groups]
    found = {period.start: period for period in report.periods}
    step = timedelta(hours=1) if filters.bucket == "1h" else timedelta(days=1)
    periods: list[tuple[UsageSums | None, ChartRow]] = []
    for number in range((filters.end - filters.start) // step):
        start = filters.start + number * step
        period, begun = found.get(start), start <= now
        amounts = period.amounts if period else {}
        values = _folded([amounts.get(each, 0) for each in ids], own)
        row = ChartRow(
            start, values if begun else (None,) * len(values), goes_on=begun and now < start + step
        )
        periods.append(((period.sums if period else UsageSums()) if begun else None, row))
    totals = _folded([group.sums.amount_pico for group in report.groups], own)
    sums = [None if each is None else each.amount_pico for each, _ in periods]
    columns = [*zip(*(row.values for _, row in periods), strict=True), sums]
    return UsageChart(
        series=named([*names[:own], *(["other"] if len(names) > own else [])]),
        periods=tuple(periods),
        totals=totals,
        digits=tuple(
            sum_digits([*column, total])
            for column, total in zip(columns, (*totals, report.totals.amount_pico), strict=True)
        ),
        prefix=symbol(report.currency),
    )


def _folded(amounts: list[int], own: int) -> tuple[int, ...]:
    """The amounts of the groups with a series of their own, and the sum of the others if there are any."""
    return (*amounts[:own], *([sum(amounts[own:])] if len(amounts) > own else []))
