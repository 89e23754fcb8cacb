"""This gateway's usage journal as metrics: its size, what waits for PostgreSQL, and how long commits take."""

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from loraplex.tenants.ledger.journal.commits import JournalRecorder
from loraplex.tenants.ledger.journal.journal import Journal

COMMIT_BUCKETS: Final = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
)


class JournalMetrics(JournalRecorder):
    """The `loraplex_journal_*` families, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._commits = Histogram(
            "loraplex_journal_commit_seconds",
            "One transaction of the journal, which may have the rows of many requests.",
            buckets=COMMIT_BUCKETS,
            registry=registry,
        )
        self._rows = self._counter("writes", "Admissions, ends and rounds of progress in the journal.")
        self._failures = self._counter("failures", "Failures of the journal's disk or file.")
        self._unreadable = self._counter("unreadable", "Journals that could not be read and were renamed.")

    def watch(self, journal: Journal) -> None:
        """Export the state of a journal."""
        self._gauge("bytes", "Size of the journal on the disk.", lambda: journal.bytes)
        self._gauge("records", "Records that PostgreSQL does not have yet.", lambda: journal.waiting)
        self._gauge(
            "oldest_seconds",
            "Age of the oldest record that PostgreSQL does not have yet; 0 without one.",
            lambda: journal.oldest_unshipped_s,
        )
        self._gauge("dead_letters", "Records that PostgreSQL rejected.", lambda: journal.dead_letter_count)
        self._gauge("full", "1 while the journal has no room for new requests.", lambda: journal.is_full)

    def committed(self, rows: int, seconds: float) -> None:
        """Count one transaction for so many callers."""
        self._rows.inc(rows)
        self._commits.observe(seconds)

    def failed(self) -> None:
        """Count one failure of the disk or the file."""
        self._failures.inc()

    def moved_aside(self) -> None:
        """Count one file that could not be read and was renamed."""
        self._unreadable.inc()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"loraplex_journal_{name}", text, registry=self._registry)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(f"loraplex_journal_{name}", text, registry=self._registry).set_function(value)
