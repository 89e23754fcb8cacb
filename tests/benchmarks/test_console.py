"""Every page of a small ledger is measured, beside a round trip, and weighed with what it names."""

from tests.benchmarks.console import measure_on
from tests.benchmarks.ledger_rows import LedgerShape, load_ledger
from tests.platform.fake_admissions import FakeAdmissions

from loraplex.tenants.database import Database

SHAPE = LedgerShape(rows=2000, months=4, tenants=2)


async def test_a_small_console(database: Database) -> None:
    progress: list[str] = []
    tenants = await load_ledger(database.url, SHAPE, progress.append)
    report = await measure_on(database, FakeAdmissions(), tenants, SHAPE, 2, progress.append)
    names = {case.name for case in report.cases}
    assert {"/console", "/console/usage", "/console/requests/{request_id}", "/console/limits"} <= names
    for case in report.cases:
        assert case.figure["p95_ms"] > 0 and case.figure["round_trip_p50_ms"] > 0
        assert 500 < case.figure["html_bytes"] < case.figure["first_load_bytes"]
    assert len(report.ratios) == 2
