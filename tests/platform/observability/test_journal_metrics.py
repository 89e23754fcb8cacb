"""Metrics of the journal: what waits and what failed, as the journal reports it."""

from pathlib import Path
from uuid import uuid4

from prometheus_client import CollectorRegistry
from tests.tenants.ledger.journal.fixtures import MAX_BYTES, reservation, used

from loraplex.platform.observability.admission_metrics import JournalMetrics
from loraplex.tenants.ledger.journal.journal import Journal, left_behind


async def test_what_waits_is_exported(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = JournalMetrics(registry)
    journal = await Journal.open(tmp_path, uuid4(), max_bytes=MAX_BYTES, recorder=metrics)
    metrics.watch(journal)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"loraplex_journal_{name}", {})

    assert (value("records"), value("oldest_seconds"), value("full")) == (0, 0, 0)
    each = reservation()
    await journal.admit(each)
    await journal.end(each.id, used(1))
    assert (value("records"), value("commit_seconds_count"), value("writes_total")) == (2, 2, 2)
    assert (value("oldest_seconds") or 0) > 0
    await journal.reject(2, "bad")
    await journal.shipped(2)
    assert (value("records"), value("oldest_seconds"), value("dead_letters")) == (0, 0, 1)
    assert (value("bytes") or 0) >= sum(path.stat().st_size for path in tmp_path.iterdir())
    await journal.close()


async def test_an_unreadable_journal_is_counted(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    Path(tmp_path, f"{uuid4()}.sqlite").write_bytes(b"garbage" * 1000)
    metrics = JournalMetrics(registry)
    assert [each async for each in left_behind(tmp_path, max_bytes=MAX_BYTES, recorder=metrics)] == []
    assert registry.get_sample_value("loraplex_journal_unreadable_total", {}) == 1
