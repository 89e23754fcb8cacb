"""Every page of a small ledger is measured, beside a round trip, and weighed with what it names; a stop keeps what there is."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.benchmarks import console
from tests.benchmarks.console import collect, measure_on
from tests.benchmarks.ledger_rows import LedgerShape, load_ledger
from tests.platform.fake_admissions import FakeAdmissions

from loraplex.platform.bench.report import Report
from loraplex.tenants.database import Database

SHAPE = LedgerShape(rows=2000, months=4, tenants=2)


async def test_a_small_console(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "WARM_UP", 0)
    monkeypatch.setattr(console, "CHROMIUM", Path("/absent"))
    progress: list[str] = []
    tenants = await load_ledger(database.url, SHAPE, progress.append)
    report = await measure_on(database, FakeAdmissions(), tenants, SHAPE, 2, progress.append)
    names = {case.name for case in report.cases}
    assert {"/console", "/console/usage", "/console/requests/{request_id}", "/console/limits"} <= names
    assert {
        "/console/billing/invoices/{invoice_id}",
        "/console/webhooks/{webhook_id}/deliveries/{delivery_id}",
    } <= names
    assert {"/operator/console", "/operator/console/tenants/{tenant_id}", "/operator/console/health"} <= names
    for case in report.cases:
        assert case.figure["p95_ms"] > 0 and case.figure["round_trip_p50_ms"] > 0
        # The page at / asks for no session and no store.
        least = 0 if case.name == "/" else 2
        assert case.figure["statements"] >= least and case.figure["views"] == 2
        assert 500 < case.figure["html_bytes"] < case.figure["first_load_bytes"]
        assert any(case.name in line and "statements" in line for line in progress)
    assert len(report.ratios) == 2


async def test_a_stop_keeps_what_was_measured() -> None:
    async def stopped() -> AsyncIterator[tuple[str, dict[str, float]]]:
        yield "/console", {"p50_ms": 1.0, "p95_ms": 201.0, "statements": 3, "first_load_bytes": 4}
        raise asyncio.CancelledError

    report, progress = Report("console", ()), list[str]()
    await collect(report, stopped(), {}, {}, progress.append)
    assert [case.name for case in report.cases] == ["/console"]
    assert progress[0].startswith("SHORT /console: ")
    assert report.notes[0].startswith("Stopped")
