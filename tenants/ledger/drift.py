"""Compares the rows of the ledger with what is summed from them: rollups by the hour, and months of these; totals by the day, and
months of these; invoices.

Invariant: each comparison is one statement, so it sees all that a settlement wrote or nothing of it; one that differs is made
again. It corrects nothing: a difference is a defect or a foreign change.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import Database
from loraplex.tenants.ids import CLOCKS_APART, FIRST_TIME, WRONG_CLOCK, uuid7_from
from loraplex.tenants.ledger.drift_sql import comparison_of
from loraplex.tenants.periods import period_end, periods_of

Store: TypeAlias = Literal["rollups", "monthly_rollups", "totals", "invoices", "counters"]
"""Sums of one kind, wherever they are kept."""
STORES: Final[tuple[Store, ...]] = ("rollups", "monthly_rollups", "totals", "invoices")
"""Those in PostgreSQL."""
HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)
ALONE: Final = text("SELECT pg_try_advisory_xact_lock(hashtextextended('loraplex usage comparison', 0))")
_OF_ROWS: Final = frozenset({"rollups", "days", "invoices"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRange:
    """What a comparison covers: the rollups of some hours or of a month, the totals of one day or month, what invoices billed of a
    month; or all of a store.
    """

    compared: Store | Literal["days", "months"]
    start: datetime
    end: datetime

    @property
    def store(self) -> Store:
        """Which sums it compares."""
        return "totals" if self.compared == "days" or self.compared == "months" else self.compared

    def __str__(self) -> str:
        return f"{self.compared} {self.start:%Y-%m-%dT%H:%MZ} to {self.end:%Y-%m-%dT%H:%MZ}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How many sums were compared, and how many differ. `drift_pico` adds up the sizes of all differences, `named` says where they
    are and by how much each sum is too large.
    """

    part: ComparedRange
    sums: int = 0
    differing: int = 0
    drift_pico: int = 0
    named: tuple[str, ...] = ()

    def __add__(self, other: "Comparison") -> "Comparison":
        """Both together, as what this one covers."""
        return replace(
            self,
            sums=self.sums + other.sums,
            differing=self.differing + other.differing,
            drift_pico=self.drift_pico + other.drift_pico,
            named=self.named + other.named,
        )


async def compare(session: AsyncSession, part: ComparedRange) -> Comparison:
    """Compare one part for all tenants, in a session of an operator.

    It reads rows with ids of that time. Where these differ from their sums, a clock may have been wrong: then it compares the
    tenants concerned once more, with the rows whose ids are up to `WRONG_CLOCK` away.
    """
    statement = comparison_of(part.compared)
    row = (await session.execute(statement, _parameters(part, CLOCKS_APART, None))).one()
    sums, tenants = row[0], row[4]
    if tenants and part.compared in _OF_ROWS:
        row = (await session.execute(statement, _parameters(part, WRONG_CLOCK, tenants))).one()
    return Comparison(
        part=part,
        sums=sums,
        differing=row[1],
        drift_pico=int(row[2]),
        named=tuple(_named(*each) for each in row[3] or ()),
    )


async def compare_ledger(database: Database) -> list[Comparison]:
    """Compare the whole ledger with all of its sums, one store after the other. Raises `DatabaseUnavailable`."""
    now = datetime.now(UTC)
    async with database.as_operator() as session:
        start, parts = await first_comparable(session) or now, await comparable_ranges(session, now, DAY)
    whole = (ComparedRange(compared=store, start=start, end=now) for store in STORES)
    found = {part.store: Comparison(part=part) for part in whole}
    for part in parts:
        async with database.as_operator() as session:
            found[part.store] += await compare(session, part)
    return [*found.values()]


async def comparable_ranges(session: AsyncSession, now: datetime, step: timedelta) -> list[ComparedRange]:
    """Everything that can be compared: what rows are left for, then the monthly rollups. `step`: hours of rollups at once."""
    first, summed = await first_comparable(session), await session.scalar(_FIRST_HOUR)
    of_rows = () if first is None else all_ranges(first, now, step)
    return [*of_rows, *(() if summed is None else monthly_ranges(summed, now))]


async def first_comparable(session: AsyncSession) -> datetime | None:
    """The begin of the first whole day whose rows the ledger still has; None for an empty ledger.

    After a month was dropped, the next one may lack rows of its first minutes, whose ids are of the month before.
    """
    first = await session.scalar(_OLDEST, {"id": uuid7_from(FIRST_TIME)})
    if first is None:
        return None
    month = _month_start(datetime.fromtimestamp((first.int >> 80) / 1000, UTC))
    summed: datetime | None = await session.scalar(_FIRST_HOUR)
    return month + DAY if summed is not None and summed < month else month


_OLDEST: Final = text("SELECT id FROM usage_records WHERE id >= :id ORDER BY id LIMIT 1")
# The rollups outlive the rows.
_FIRST_HOUR: Final = text("""
    SELECT min(f.hour) FROM tenants t
    CROSS JOIN LATERAL (SELECT hour FROM usage_rollups u WHERE u.tenant_id = t.id ORDER BY hour LIMIT 1) f""")


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
    month = periods.month.removeprefix("m:")
    if part.compared == "months":
        return {"period": periods.month, "days": f"d:{month}-%", "tenants": tenants}
    parameters = {
        "start": part.start,
        "end": part.end,
        "first_id": uuid7_from(part.start - clocks_apart),
        "last_id": uuid7_from(part.end + clocks_apart),
        "tenants": tenants,
    }
    if part.compared == "invoices":
        return {**parameters, "invoiced": month}
    return {**parameters, "period": periods.day} if part.compared == "days" else parameters


def _named(tenant: str, place: str, exceeds: Mapping[str, int]) -> str:
    return f"tenant {tenant}, {place}: {', '.join(f'{name} {by:+d}' for name, by in exceeds.items())}"


def _month_start(time: datetime) -> datetime:
    return time.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
