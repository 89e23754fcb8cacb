"""The loader writes rows as gateways do, and the report has a figure and a yardstick for each measurement."""

from tests.benchmarks.ledger import LedgerLoad, measure_on
from tests.benchmarks.ledger_rows import LedgerShape, load_ledger
from tests.tenants.ledger.settled_rows import check_sums, read

from loraplex.tenants.database import Database

SHAPE = LedgerShape(rows=2000, months=4, tenants=2)


async def test_a_small_ledger(database: Database) -> None:
    progress: list[str] = []
    tenants = await load_ledger(database.url, SHAPE, progress.append)
    await check_sums(database)
    by_month = await read(database, "SELECT tableoid, count(*) FROM usage_records GROUP BY 1")
    assert len(by_month) == 4 and sum(count for _, count in by_month) == SHAPE.rows
    load = LedgerLoad(rate=100.0, seconds=2.0, queries=2)
    report = await measure_on(database, tenants, SHAPE, load, progress.append)
    queries, preview, by_hours, settled, dropped = report.cases
    assert all(case.figure["round_trip_p50_ms"] > 0 for case in report.cases)
    assert all(case.figure["p95_ms"] > 0 for case in (queries, preview, by_hours))
    assert settled.figure["rows_per_s"] > 0
    assert (dropped.figure["months"], len(report.ratios)) == (1, 5)
