"""Compares the rows of the ledger with what is summed from them: rollups by the hour, and months of these; totals by the day, and
months of these; invoices.

Invariant: each comparison is one statement, so it sees all that a settlement wrote or nothing of it; one that differs is made
again. It corrects nothing: a difference is a defect or a foreign change.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.ids import CLOCKS_APART, WRONG_CLOCK, uuid7_from
from loraplex.tenants.ledger.invoice_drift import invoices_compared
from loraplex.tenants.ledger.statements import AMOUNT_NANO
from loraplex.tenants.models import NO_ID
from loraplex.tenants.periods import period_end, periods_of

Compared: TypeAlias = Literal["rollups", "monthly_rollups", "days", "months", "invoices"]
MAX_NAMED: Final = 20
"""Differences that a comparison names; it counts and adds up all of them."""
HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)
# Ids outside contain no time: releases before the ledger had partitions derived some from other ids.
FIRST_TIME: Final = datetime(2020, 1, 1, tzinfo=UTC)
LAST_TIME: Final = datetime(2100, 1, 1, tzinfo=UTC)
ALONE: Final = text("SELECT pg_try_advisory_xact_lock(hashtextextended('loraplex usage comparison', 0))")
_RECORDS: Final = """usage_records r WHERE admitted_at >= :start AND admitted_at < :end
            AND (id >= :first_id AND id < :last_id OR id < :no_time_before OR id >= :no_time_from)
            AND (CAST(:tenants AS uuid[]) IS NULL OR r.tenant_id = ANY(CAST(:tenants AS uuid[])))"""
_SUMS: Final = ("requests", "uncached_tokens", "cached_tokens", "completion_tokens", "amount_pico")
_TOTALS: Final = ("requests", "tokens", "amount_nano")


def _behind(names: tuple[str, ...]) -> str:
    """By how much `stored` exceeds `expected`, as JSON without what is equal."""
    pairs = (f"'{name}', nullif(coalesce(s.{name}, 0) - coalesce(e.{name}, 0), 0)" for name in names)
    return f"jsonb_strip_nulls(jsonb_build_object({', '.join(pairs)}))"


_ROLLUPS: Final = f"""
    SELECT tenant_id, {_behind(_SUMS)} AS differs,
        concat_ws(' ', to_char(hour AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'), 'adapter', adapter_id, 'key', api_key_id,
            'price', price_version_id, currency) AS place,
        coalesce(s.amount_pico, 0) - coalesce(e.amount_pico, 0) AS drift_pico
    FROM (
        SELECT tenant_id, date_trunc('hour', admitted_at, 'UTC') AS hour, coalesce(adapter_id, '{NO_ID}') AS adapter_id,
            api_key_id, coalesce(price_version_id, '{NO_ID}') AS price_version_id, currency,
            count(*) FILTER (WHERE kind = 'usage') AS requests, sum(uncached_tokens) AS uncached_tokens,
            sum(cached_tokens) AS cached_tokens, sum(completion_tokens) AS completion_tokens,
            sum(amount_pico) AS amount_pico
        FROM {_RECORDS} GROUP BY 1, 2, 3, 4, 5, 6
    ) e FULL JOIN (
        SELECT u.* FROM tenants t JOIN usage_rollups u ON u.tenant_id = t.id WHERE u.hour >= :start AND u.hour < :end
    ) s USING (tenant_id, hour, adapter_id, api_key_id, price_version_id, currency)"""
_MONTHLY: Final = f"""
    SELECT tenant_id, {_behind(_SUMS)} AS differs,
        concat_ws(' ', to_char(month AT TIME ZONE 'UTC', 'YYYY-MM'), 'adapter', adapter_id, 'price', price_version_id,
            currency) AS place,
        coalesce(s.amount_pico, 0) - coalesce(e.amount_pico, 0) AS drift_pico
    FROM (
        SELECT u.tenant_id, CAST(:start AS timestamptz) AS month, u.adapter_id, u.price_version_id, u.currency,
            {", ".join(f"sum(u.{name}) AS {name}" for name in _SUMS)}
        FROM tenants t JOIN usage_rollups u ON u.tenant_id = t.id WHERE u.hour >= :start AND u.hour < :end
        GROUP BY 1, 3, 4, 5
    ) e FULL JOIN (
        SELECT * FROM monthly_rollups WHERE month >= :start AND month < :end
    ) s USING (tenant_id, month, adapter_id, price_version_id, currency)"""
_OF_RECORDS: Final = f"""
        SELECT r.tenant_id, l.level, l.subject_id, r.day AS period, sum(r.requests) AS requests, sum(r.tokens) AS tokens,
            sum(r.amount_nano) AS amount_nano
        FROM (
            SELECT tenant_id, api_key_id, adapter_id, day, count(*) FILTER (WHERE kind = 'usage') AS requests,
                sum(uncached_tokens + cached_tokens + completion_tokens) AS tokens, sum({AMOUNT_NANO}) AS amount_nano
            FROM {_RECORDS} GROUP BY 1, 2, 3, 4
        ) r CROSS JOIN LATERAL (
            VALUES ('tenant', r.tenant_id), ('key', r.api_key_id), ('adapter', r.adapter_id)
        ) l (level, subject_id)
        WHERE l.subject_id IS NOT NULL GROUP BY 1, 2, 3, 4"""
_OF_DAYS: Final = """
        SELECT tenant_id, level, subject_id, :period AS period, sum(requests) AS requests, sum(tokens) AS tokens,
            sum(amount_nano) AS amount_nano
        FROM usage_totals WHERE period LIKE :days GROUP BY 1, 2, 3"""


def _totals(expected: str) -> str:
    return f"""
    SELECT tenant_id, {_behind(_TOTALS)} AS differs, concat_ws(' ', period, level, subject_id) AS place,
        (coalesce(s.amount_nano, 0) - coalesce(e.amount_nano, 0)) * 1000::numeric AS drift_pico
    FROM ({expected}) e FULL JOIN (SELECT * FROM usage_totals WHERE period = :period) s
        USING (tenant_id, level, subject_id, period)"""


_COMPARED: Final[Mapping[Compared, str]] = {
    "rollups": _ROLLUPS,
    "monthly_rollups": _MONTHLY,
    "days": _totals(_OF_RECORDS),
    "months": _totals(_OF_DAYS),
    "invoices": invoices_compared(_RECORDS),
}
_OF_ROWS: Final[frozenset[Compared]] = frozenset({"rollups", "days", "invoices"})
_RESULT: Final = f"""
SELECT count(*), count(*) FILTER (WHERE differs <> '{{}}'), coalesce(sum(abs(drift_pico)), 0),
    (array_agg(jsonb_build_array(tenant_id, place, differs)) FILTER (WHERE differs <> '{{}}'))[1:{MAX_NAMED}],
    array_agg(DISTINCT tenant_id) FILTER (WHERE differs <> '{{}}')
FROM compared WHERE CAST(:tenants AS uuid[]) IS NULL OR tenant_id = ANY(CAST(:tenants AS uuid[]))"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRange:
    """What one comparison covers: the rollups of some hours or of a month, the totals of one day or month, or what invoices billed
    of a month.
    """

    compared: Compared
    start: datetime
    end: datetime

    @property
    def store(self) -> str:
        """Which sums it compares: `rollups`, `monthly_rollups`, `totals` or `invoices`."""
        return "totals" if self.compared in ("days", "months") else self.compared

    def __str__(self) -> str:
        return f"{self.compared} {self.start:%Y-%m-%dT%H:%MZ} to {self.end:%Y-%m-%dT%H:%MZ}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One sum that is not that of its rows. `exceeds`: by how much each of its columns is larger; negative if smaller."""

    tenant_id: UUID
    place: str
    exceeds: Mapping[str, int]

    def __str__(self) -> str:
        return f"tenant {self.tenant_id}, {self.place}: {', '.join(f'{name} {by:+d}' for name, by in self.exceeds.items())}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result: how many sums were compared and how many differ. `drift_pico` adds up the sizes of all differences."""

    part: ComparedRange
    sums: int
    differing: int
    drift_pico: int
    named: tuple[Difference, ...]


async def compare(session: AsyncSession, part: ComparedRange) -> Comparison:
    """Compare one part for all tenants, in a session of an operator.

    It reads rows with ids of that time. Where these differ from their sums, a clock may have been wrong: then it compares the
    tenants concerned once more, with the rows whose ids are up to `WRONG_CLOCK` away.
    """
    statement = text(f"WITH compared AS MATERIALIZED ({_COMPARED[part.compared]}){_RESULT}")
    row = (await session.execute(statement, _parameters(part, CLOCKS_APART, None))).one()
    sums, tenants = row[0], row[4]
    if tenants and part.compared in _OF_ROWS:
        row = (await session.execute(statement, _parameters(part, WRONG_CLOCK, tenants))).one()
    named = tuple(Difference(UUID(tenant), place, exceeds) for tenant, place, exceeds in row[3] or ())
    return Comparison(part=part, sums=sums, differing=row[1], drift_pico=int(row[2]), named=named)


async def first_comparable(session: AsyncSession) -> datetime | None:
    """The begin of the first whole day whose rows the ledger still has; None for an empty ledger.

    After a month was dropped, the next one may lack rows of its first minutes, whose ids are of the month before.
    """
    first = await session.scalar(_OLDEST, {"id": _FIRST_ID})
    if first is None:
        return None
    month = _month_start(datetime.fromtimestamp((first.int >> 80) / 1000, UTC))
    summed = await first_summed(session)
    return month + DAY if summed is not None and summed < month else month


_FIRST_ID: Final = uuid7_from(FIRST_TIME)
_OLDEST: Final = text("SELECT id FROM usage_records WHERE id >= :id ORDER BY id LIMIT 1")
_FIRST_HOUR: Final = text("""
    SELECT min(f.hour) FROM tenants t
    CROSS JOIN LATERAL (SELECT hour FROM usage_rollups u WHERE u.tenant_id = t.id ORDER BY hour LIMIT 1) f""")


async def first_summed(session: AsyncSession) -> datetime | None:
    """The first hour of the rollups, which outlive the rows; None without any."""
    first: datetime | None = await session.scalar(_FIRST_HOUR)
    return first


def newest_ranges(now: datetime) -> list[ComparedRange]:
    """What changes now: the rollups of this hour and of the one before."""
    hour = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    return [ComparedRange(compared="rollups", start=start, end=start + HOUR) for start in (hour, hour - HOUR)]


def all_ranges(first: datetime, now: datetime, step: timedelta) -> Iterator[ComparedRange]:
    """Everything since `first`, the newest day first, then the months. `step`: hours of rollups at once, at most a day."""
    day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    months = set()
    while day >= first:
        yield ComparedRange(compared="days", start=day, end=day + DAY)
        for start in (day + place * step for place in range(DAY // step)):
            yield ComparedRange(compared="rollups", start=start, end=start + step)
        months.add(_month_start(day))
        day -= DAY
    for month in sorted(months, reverse=True):
        end = period_end(periods_of(month).month)
        yield ComparedRange(compared="months", start=month, end=end)
        yield ComparedRange(compared="invoices", start=month, end=end)


def monthly_ranges(first: datetime, now: datetime) -> Iterator[ComparedRange]:
    """The monthly rollups of every month since the hour `first`, the newest first."""
    month = _month_start(now.astimezone(UTC))
    while month >= _month_start(first.astimezone(UTC)):
        yield ComparedRange(compared="monthly_rollups", start=month, end=period_end(periods_of(month).month))
        month = _month_start(month - DAY)


def _parameters(
    part: ComparedRange, clocks_apart: timedelta, tenants: Sequence[UUID] | None
) -> dict[str, Any]:
    """`tenants`: whose rows and sums are compared; None: everyone's."""
    periods = periods_of(part.start)
    if part.compared == "months":
        return {
            "period": periods.month,
            "days": f"d:{periods.month.removeprefix('m:')}-%",
            "tenants": tenants,
        }
    parameters = {
        "start": part.start,
        "end": part.end,
        "first_id": uuid7_from(part.start - clocks_apart),
        "last_id": uuid7_from(part.end + clocks_apart),
        "no_time_before": _FIRST_ID,
        "no_time_from": uuid7_from(LAST_TIME),
        "tenants": tenants,
    }
    if part.compared == "invoices":
        return {**parameters, "invoiced": periods.month.removeprefix("m:")}
    return {**parameters, "period": periods.day} if part.compared == "days" else parameters


def _month_start(time: datetime) -> datetime:
    return time.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
