"""The usage ledger with millions of rows: a usage query, an invoice's preview, a dropped month, and settlements at a fixed rate.

Invariant: beside each time stands one of a bare round trip to the same PostgreSQL in the same run.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from uuid import UUID, uuid4

from sqlalchemy import text
from tests.benchmarks.ledger_rows import LedgerShape, load_ledger

from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.report import Case, Ratio, Report
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.datastores.migrations import upgrade
from loraplex.tenants.billing.pricing import Price, PriceVersion
from loraplex.tenants.database import Database
from loraplex.tenants.ids import uuid7
from loraplex.tenants.invoices.invoices import InvoiceRepository
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.ledger.histograms import GAP_BOUNDS_MS, counted
from loraplex.tenants.ledger.partitions import LEDGER, LedgerPartitions, LedgerRetention
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.ledger.usage_reports import Bucket, Dimension, UsageQuery, first_rows
from loraplex.tenants.periods import periods_of
from loraplex.tenants.quotas.reservation import (
    RequestTimings,
    Reservation,
    ReservationRequest,
    SettledUsage,
)

MAX_QUERY_MS, MAX_DROP_MS, MAX_CORES = 200.0, 100.0, 2.0
# The time ends when the last row is durable, after the last one has come.
MIN_SHARE = 0.95
PRICE = PriceVersion(id=uuid4(), currency="USD", price=Price(prompt=100_000, completion=400_000))
TICK_S, PAUSE_S = 0.02, 0.5
CLOCK_TICKS = 100.0
PAGE_ROWS = 101
BUCKETS: Final[tuple[Bucket, ...]] = ("1h", "1d", "1mo")
GROUPINGS: Final[tuple[tuple[Dimension, ...], ...]] = (
    *((), ("adapter",), ("key",), ("class",)),
    *(("adapter", "key"), ("adapter", "class"), ("adapter", "key", "class")),
)
COLUMNS = (
    *("p50_ms", "p95_ms", "p99_ms", "max_ms", "rows_per_s", "cores", "dropped_rows", "longest_drop_ms"),
    *("round_trip_p50_ms", "round_trip_p95_ms", "round_trip_max_ms"),
)
# What an invoice bills, without monthly rollups.
SUMS_OF_HOURS = text("""
    SELECT currency, date_trunc('month', hour, 'UTC'), adapter_id, price_version_id, sum(uncached_tokens), sum(cached_tokens),
        sum(completion_tokens), sum(amount_pico)
    FROM usage_rollups WHERE tenant_id = :tenant_id GROUP BY 1, 2, 3, 4
""")
BACKENDS = text("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLoad:
    """What is measured on the loaded ledger. `rate`: settled rows per second, for `seconds`."""

    rate: float = 500.0
    seconds: float = 20.0
    queries: int = 200


async def measure_ledger(shape: LedgerShape, load: LedgerLoad, progress: Callable[[str], None]) -> Report:
    """Load new stores, then measure. Takes minutes for millions of rows."""
    with TemporaryDirectory(prefix="loraplex-bench-") as folder:
        async with EmbeddedServices(Path(folder)) as services:
            await asyncio.to_thread(upgrade, services.database_url)
            database = Database(services.database_url)
            try:
                tenants = await load_ledger(services.database_url, shape, progress)
                return await measure_on(database, tenants, shape, load, progress)
            finally:
                await database.close()


async def measure_on(
    database: Database,
    tenants: Sequence[UUID],
    shape: LedgerShape,
    load: LedgerLoad,
    progress: Callable[[str], None],
) -> Report:
    """Measure on a loaded database."""
    report = Report("ledger", COLUMNS)
    shapes = asdict(shape) | asdict(load)
    progress("usage queries")
    queries = await measure_queries(database, tenants, load.queries)
    progress("invoice previews")
    previews = await measure_previews(database, tenants, load.queries)
    by_hours = await measure_sums_of_hours(database, tenants, load.queries)
    progress("settlements")
    settled = await measure_settlements(database, tenants, load)
    progress("a dropped month")
    dropped = await measure_drops(database, tenants, load)
    for name, figure in (
        *(("usage query", queries), ("invoice preview", previews), ("its sums from hours", by_hours)),
        *(("settlement", settled), ("dropped months", dropped)),
    ):
        report.cases.append(Case(name, shapes, figure))
    report.ratios += [
        Ratio("ms of a usage query at p95", queries["p95_ms"], MAX_QUERY_MS, "at most"),
        Ratio("ms of an invoice's preview at p95", previews["p95_ms"], MAX_QUERY_MS, "at most"),
        Ratio("settled rows per second", settled["rows_per_s"], MIN_SHARE * load.rate, "at least"),
        Ratio("cores of the gateway and PostgreSQL meanwhile", settled["cores"], MAX_CORES, "at most"),
        Ratio(
            "ms that dropping a month takes: no writer waits longer for it",
            dropped["longest_drop_ms"],
            MAX_DROP_MS,
            "at most",
        ),
    ]
    report.notes.append(
        "A usage query is the first page of a tenant's report of 31 days, with its totals, by every bucket and grouping in turn. A preview is what a "
        "tenant's invoice of this month and all before would be; beside it stands the one statement that it would read without monthly rollups. Settlements come at a fixed rate, "
        "with phases and histograms; cores are those of this process and of PostgreSQL's."
    )
    return report


async def measure_queries(database: Database, tenants: Sequence[UUID], count: int) -> dict[str, float]:
    """The first page of a tenant's usage of 31 days with its totals, by every bucket and grouping in turn."""
    chosen, until = random.Random(0), datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    kinds = cycle(product(BUCKETS, GROUPINGS))

    async def query() -> None:
        tenant_id, (bucket, group_by) = chosen.choice(tenants), next(kinds)
        start = until - timedelta(days=31 + chosen.randrange(60))
        report = UsageQuery(
            tenant_id=tenant_id,
            start=start,
            end=start + timedelta(days=31),
            bucket=bucket,
            group_by=frozenset(group_by),
        )
        async with database.as_tenant(tenant_id) as session:
            await first_rows(session, report, PAGE_ROWS)

    return await timed(query, count) | await round_trips(database, count)


async def measure_previews(database: Database, tenants: Sequence[UUID], count: int) -> dict[str, float]:
    """What the invoice of this month would be now: nothing was billed before."""
    tenant_ids, month = cycle(tenants), Month.of(datetime.now(UTC))

    async def preview() -> None:
        tenant_id = next(tenant_ids)
        async with database.as_tenant(tenant_id) as session:
            found = await InvoiceRepository(session, tenant_id).preview(tenant_id, month, None)
        if found.content.is_empty:
            raise LookupError("a tenant has nothing to bill")

    return await timed(preview, count) | await round_trips(database, count)


async def measure_sums_of_hours(database: Database, tenants: Sequence[UUID], count: int) -> dict[str, float]:
    """Sum the hourly rollups of a tenant's whole past, as a preview would without monthly ones."""
    tenant_ids = cycle(tenants)

    async def sums() -> None:
        tenant_id = next(tenant_ids)
        async with database.as_tenant(tenant_id) as session:
            (await session.execute(SUMS_OF_HOURS, {"tenant_id": tenant_id})).all()

    return await timed(sums, count) | await round_trips(database, count)


async def measure_settlements(
    database: Database, tenants: Sequence[UUID], load: LedgerLoad
) -> dict[str, float]:
    """Settle rows at the load's rate, whether or not earlier ones are written."""
    async with opened_ledger(database) as ledger:
        await ledger.settle(reservation(tenants[0]), USAGE)
        before, began = await cpu_seconds(database), time.perf_counter()
        waits = await settle_at(ledger, tenants, load.rate, load.seconds)
        seconds = time.perf_counter() - began
        cores = (await cpu_seconds(database) - before) / seconds
    figure = spread(waits) | {"rows_per_s": len(waits) / seconds, "cores": cores}
    return figure | await round_trips(database, 200)


async def measure_drops(database: Database, tenants: Sequence[UUID], load: LedgerLoad) -> dict[str, float]:
    """Drop every month that is older than the shortest retention, while rows are settled at the load's rate."""
    rows = text(
        "SELECT sum(reltuples)::bigint FROM pg_class WHERE relname LIKE 'usage_records_20%' AND relkind = 'r'"
    )
    async with database.as_operator() as session:
        before = await session.scalar(rows) or 0
    partitions, drops = LedgerPartitions(database.url, LedgerRetention()), list[float]()
    async with opened_ledger(database) as ledger:
        await ledger.settle(reservation(tenants[0]), USAGE)
        settling = asyncio.create_task(settle_at(ledger, tenants, load.rate, load.seconds))
        while not settling.done():
            start = time.perf_counter()
            if await partitions.drop_oldest(LEDGER, keep=2) is not None:
                drops.append(time.perf_counter() - start)
            await asyncio.sleep(PAUSE_S)
        waits = await settling
        await partitions.close()
    if not drops:
        raise LookupError("no month was dropped: the table was busy all the time")
    async with database.as_operator() as session:
        after = await session.scalar(rows) or 0
    figure = {"dropped_rows": before - after, "months": len(drops), "longest_drop_ms": max(drops) * 1000}
    return spread(waits) | figure | await round_trips(database, 200)


USAGE = SettledUsage(
    outcome="completed",
    prompt_tokens=200,
    cached_tokens=64,
    completion_tokens=60,
    amount_pico=37_600_000,
    timings=RequestTimings(
        ttft_ms=120,
        duration_ms=1300,
        phases={"queue": (2, 10), "prefill": (12, 108), "decode": (120, 1180)},
        gap_buckets=counted(GAP_BOUNDS_MS, [20.0] * 59),
    ),
)


def reservation(tenant_id: UUID) -> Reservation:
    """An admitted request of one of the tenant's keys and adapters."""
    at = datetime.now(UTC)
    periods = periods_of(at)
    request = ReservationRequest(
        id=uuid7(),
        tenant_id=tenant_id,
        api_key_id=UUID(int=random.randrange(3)),
        adapter_id=UUID(int=random.randrange(4)),
        request_id=uuid4().hex,
        prompt_tokens=200,
        completion_tokens=100,
    )
    return Reservation(request=request, day=periods.day, month=periods.month, admitted_at=at, price=PRICE)


async def settle_at(ledger: UsageLedger, tenants: Sequence[UUID], rate: float, seconds: float) -> list[float]:
    """Settle `rate` rows per second; return the seconds that each waited to be durable."""
    began, waiting = time.perf_counter(), list[asyncio.Task[float]]()

    async def settle() -> float:
        start = time.perf_counter()
        await ledger.settle(reservation(random.choice(tenants)), USAGE)
        return time.perf_counter() - start

    while (passed := time.perf_counter() - began) < seconds:
        due = round(passed * rate) - len(waiting)
        waiting += [asyncio.create_task(settle()) for _ in range(due)]
        await asyncio.sleep(TICK_S)
    return [await each for each in waiting]


async def round_trips(database: Database, count: int) -> dict[str, float]:
    """A transaction that only reads a constant."""
    found = await timed(database.ping, count)
    return {f"round_trip_{share}_ms": found[f"{share}_ms"] for share in ("p50", "p95", "max")}


async def timed(work: Callable[[], Awaitable[None]], count: int) -> dict[str, float]:
    await work()
    waits = []
    for _ in range(count):
        start = time.perf_counter()
        await work()
        waits.append(time.perf_counter() - start)
    return spread(waits)


def spread(waits: Sequence[float]) -> dict[str, float]:
    shares = {f"p{share}_ms": percentile(waits, share) * 1000 for share in (50, 95, 99)}
    return shares | {"max_ms": max(waits) * 1000}


@asynccontextmanager
async def opened_ledger(database: Database) -> AsyncIterator[UsageLedger]:
    ledger = UsageLedger(database)
    try:
        yield ledger
    finally:
        await ledger.close()


async def cpu_seconds(database: Database) -> float:
    """The processor time of this process and of all processes of PostgreSQL that serve or help a connection."""
    async with database.as_operator() as session:
        backends = (await session.scalars(BACKENDS)).all()
    return time.process_time() + sum(map(_process_seconds, backends))


def _process_seconds(pid: int) -> float:
    """User and system time, from fields 14 and 15 of `/proc/PID/stat`; the second field may contain spaces."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
