"""The measurement of the journal: each number of writers has its figures and its yardstick."""

from pathlib import Path

from tests.benchmarks.journal import WRITERS, JournalShape, measure_journal


async def test_every_number_of_writers_is_measured(tmp_path: Path) -> None:
    said = list[str]()
    report = await measure_journal(JournalShape(writes=256, rounds=1, folder=tmp_path), said.append)
    assert len(said) == len(report.cases) == len(report.ratios) == len(WRITERS)
    for case in report.cases:
        figure = case.figure
        assert figure["write_p99_ms"] >= figure["write_p50_ms"] > 0
        assert figure["sync_p50_ms"] > 0 and figure["commit_bytes"] > 0
    assert report.cases[-1].figure["writes_per_commit"] > 1
    assert list(tmp_path.iterdir()) == []
