"""The overview of a tenant: requests and errors of a range beside the range before, spend and its forecast, what needs attention.

Invariant: everything comes from hourly rollups and bounded lists; hours, days and months are UTC, and the last one goes on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final, Literal, TypeAlias, TypeVar
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.ledger.request_reports import (
    FailureRow,
    RequestRow,
    RequestSums,
    latest_failures,
    requests_by_adapter,
    total,
)
from loraplex.tenants.ledger.usage_reports import daily_sums
from loraplex.tenants.models import NO_ID
from loraplex.tenants.models.usage import REST
from loraplex.tenants.registry.catalog import AdapterCatalog
from loraplex.tenants.registry.summaries import (
    ServedAdapter,
    TroubledVersion,
    served_adapters,
    troubled_versions,
)

KeyT = TypeVar("KeyT")

HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)
_TICK: Final = timedelta(microseconds=1)
WINDOWS: Final = (7, 28)
"""Whole days whose average rate a forecast continues."""
NAMED_ADAPTERS: Final = 8
CHARTED: Final = 5
FAILURES: Final = 6
NOTES: Final = 3
EXPIRES_SOON: Final = timedelta(days=7)
PICO_PER_MICRO: Final = 1_000_000
RangeName: TypeAlias = Literal["24h", "7d", "30d"]
RANGES: Final[Mapping[RangeName, tuple[timedelta, timedelta]]] = {
    "24h": (24 * HOUR, HOUR),
    "7d": (7 * DAY, 6 * HOUR),
    "30d": (30 * DAY, DAY),
}
"""The length of each range and of its periods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPeriod:
    """`requests` by the ids of `RequestOverview.series`. A period without requests has empty sums."""

    start: datetime
    sums: RequestSums
    requests: Mapping[UUID, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSeries:
    """An adapter of the charts. `name` is None where `base_model`, and for the rest of all adapters, whose id is `REST`."""

    id: UUID
    name: str | None
    base_model: bool
    sums: RequestSums


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLine:
    """A registered adapter and its requests in the range. `digests`: those of the versions of its `production` alias."""

    summary: ServedAdapter
    sums: RequestSums
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOverview:
    """A range of whole periods that ends with the current one, and the sums of the range before it."""

    start: datetime
    end: datetime
    step: timedelta
    current: RequestSums
    previous: RequestSums
    periods: tuple[RequestPeriod, ...]
    series: tuple[AdapterSeries, ...]
    adapters: tuple[AdapterLine, ...]
    all_adapters: int
    failures: tuple[FailureRow, ...]


@dataclass(frozen=True, slots=True)
class SpendForecast:
    """The month's amount at its end, in pico-units of money."""

    low_pico: int
    high_pico: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendOverview:
    """The current month in one currency, in pico-units; `budget_micro` is the tenant's monthly budget in micro-units.

    `days`: every day of the month so far.
    """

    currency: str
    month: date
    month_pico: int
    today_pico: int
    days: tuple[tuple[date, int], ...]
    forecast: SpendForecast | None
    budget_micro: int | None

    @property
    def budget_ends_early(self) -> bool:
        """Whether the budget is used up, or will be before the month ends, at the higher pace."""
        if self.budget_micro is None:
            return False
        high = self.month_pico if self.forecast is None else self.forecast.high_pico
        return max(high, self.month_pico) > self.budget_micro * PICO_PER_MICRO

    @property
    def budget_used_up(self) -> bool:
        return self.budget_micro is not None and self.month_pico >= self.budget_micro * PICO_PER_MICRO


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Something that needs a person. `kind` selects the words; the other fields are what they name."""

    kind: Literal["quarantined", "budget", "rejected", "key_expires"]
    version: TroubledVersion | None = None
    key_id: str | None = None
    key_name: str | None = None
    at: datetime | None = None


async def requests(
    session: AsyncSession, tenant_id: UUID, range_name: RangeName, now: datetime
) -> RequestOverview:
    """Read the requests of a range, and their adapters."""
    length, step = RANGES[range_name]
    end = _next(now, step)
    start = end - length
    rows = await requests_by_adapter(
        session, tenant_id, start=start - length, end=end, step=step, ranked_from=start, named=NAMED_ADAPTERS
    )
    current = [row for row in rows if row.start >= start]
    by_id = _by_adapter(current)
    known = [row for row in by_id if row.id not in (NO_ID, REST)]
    summaries, count = await served_adapters(session, tenant_id, [each.id for each in known], NAMED_ADAPTERS)
    sums = {each.id: each.sums for each in by_id}
    digests = await AdapterCatalog(session, tenant_id).production_digests([each.id for each in summaries])
    series, sum_of_all = _charted(by_id), total(each.sums for each in by_id)
    failures = await latest_failures(session, tenant_id, start, FAILURES)
    return RequestOverview(
        start=start,
        end=end,
        step=step,
        current=sum_of_all,
        previous=total(row.sums for row in rows if row.start < start),
        periods=_periods(current, series, start, end, step),
        series=series,
        adapters=tuple(
            AdapterLine(
                summary=each,
                sums=sums.get(each.id, RequestSums()),
                digests=tuple(digests.get(each.id, ())),
            )
            for each in summaries
        ),
        all_adapters=count,
        failures=tuple(failures),
    )


async def spend(
    session: AsyncSession, tenant_id: UUID, currency: str, now: datetime, budget_micro: int | None = None
) -> SpendOverview:
    """Read the month so far, exact, and the days that its forecast continues. `budget_micro`: the tenant's for a month."""
    today = now.astimezone(UTC).date()
    month = today.replace(day=1)
    first = min(month, today - max(WINDOWS) * DAY)
    sums = await daily_sums(session, tenant_id, currency, first, today)
    days = {start.date(): each.amount_pico for start, each in sums.items()}
    of_month = tuple((day, amount) for day, amount in days.items() if day >= month)
    spent = sum(amount for _, amount in of_month)
    return SpendOverview(
        currency=currency,
        month=month,
        month_pico=spent,
        today_pico=days[today],
        days=of_month,
        forecast=month_forecast(spent, days, now),
        budget_micro=budget_micro,
    )


def month_forecast(spent_pico: int, days: Mapping[date, int], now: datetime) -> SpendForecast | None:
    """Forecast what a month will have cost at its end, in exact integers: add the time that is left at a daily rate, the
    average of the last 7 whole days and that of the last 28. The lower and the higher of the two are the range.

    `days`: pico-units by day (UTC), where a day without use may be absent. A tenant's average begins with its first day of
    use. None without a whole day of use. Today counts in `spent_pico` only, since it goes on.
    """
    today = now.astimezone(UTC).date()
    left = _month_end(today) - now
    used = [day for day, amount in days.items() if amount and day < today]
    if not used:
        return None
    ends = []
    for window in WINDOWS:
        first = max(today - window * DAY, min(used))
        amount = sum(pico for day, pico in days.items() if first <= day < today)
        ends.append(spent_pico + amount * (left // _TICK) // ((today - first).days * (DAY // _TICK)))
    return SpendForecast(min(ends), max(ends))


def _month_end(day: date) -> datetime:
    return _midnight((day.replace(day=1) + 31 * DAY).replace(day=1))


async def attention(
    session: AsyncSession, tenant_id: UUID, spent: SpendOverview, now: datetime
) -> tuple[Attention, ...]:
    """What needs a person, the worst first: quarantined versions, the budget, rejected versions, keys that expire."""
    troubled = await troubled_versions(session, tenant_id, NOTES)
    expiring = await KeyRepository(session).expiring(tenant_id, now + EXPIRES_SOON, NOTES)
    quarantined = [
        Attention(kind="quarantined", version=each) for each in troubled if each.state == "quarantined"
    ]
    rejected = [Attention(kind="rejected", version=each) for each in troubled if each.state == "rejected"]
    of_keys = [
        Attention(kind="key_expires", key_id=key.key_id, key_name=key.name, at=key.expires_at)
        for key in expiring
    ]
    budget = [Attention(kind="budget")] if spent.budget_ends_early else []
    return (*quarantined, *budget, *rejected, *of_keys)[:NOTES]


def _next(now: datetime, step: timedelta) -> datetime:
    """The end of the period of `now`; periods begin at midnight."""
    midnight = _midnight(now.astimezone(UTC).date())
    return midnight + ((now - midnight) // step + 1) * step


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _by_adapter(rows: Sequence[RequestRow]) -> list[AdapterSeries]:
    """The sums of each adapter, those with the most requests first, and the rest of all last."""
    of = _grouped(rows, lambda row: row.adapter_id)
    names = {row.adapter_id: row.adapter for row in rows}
    found = [
        AdapterSeries(
            id=each,
            name=name if name is not None or each in (NO_ID, REST) else str(each),
            base_model=each == NO_ID,
            sums=total(row.sums for row in of[each]),
        )
        for each, name in names.items()
    ]
    return sorted(found, key=lambda each: (each.id == REST, -each.sums.requests, each.id))


def _grouped(rows: Iterable[RequestRow], key: Callable[[RequestRow], KeyT]) -> dict[KeyT, list[RequestRow]]:
    groups: dict[KeyT, list[RequestRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _charted(adapters: Sequence[AdapterSeries]) -> tuple[AdapterSeries, ...]:
    """At most `CHARTED` series; the last one is the rest if there are more."""
    if len(adapters) <= CHARTED:
        return tuple(adapters)
    rest = total(each.sums for each in adapters[CHARTED - 1 :])
    return (*adapters[: CHARTED - 1], AdapterSeries(id=REST, name=None, base_model=False, sums=rest))


def _periods(
    rows: Sequence[RequestRow],
    charted: Sequence[AdapterSeries],
    start: datetime,
    end: datetime,
    step: timedelta,
) -> tuple[RequestPeriod, ...]:
    ids = {each.id for each in charted}
    of = _grouped(rows, lambda row: row.start)
    periods = []
    for begin in (start + number * step for number in range((end - start) // step)):
        counts: dict[UUID, int] = {}
        for row in of.get(begin, ()):
            series = row.adapter_id if row.adapter_id in ids else REST
            counts[series] = counts.get(series, 0) + row.sums.requests
        sums = total(row.sums for row in of.get(begin, ()))
        periods.append(RequestPeriod(start=begin, sums=sums, requests=counts))
    return tuple(periods)
