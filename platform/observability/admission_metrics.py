"""Admission and this gateway's usage journal as metrics. Labels come from closed sets: limits, levels and outcomes."""

from collections.abc import Callable
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.admission.recording import NONE, AdmissionRecorder
from loraplex.tenants.ledger.journal.commits import JournalRecorder
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.quotas.limits import COUNTED, Level

DECISIONS: Final = ("admitted", "rate_limited", "exhausted", "unavailable", "stale", "unpriced")
ADMISSION_BUCKETS: Final = (
    *(0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
SHARE_BUCKETS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
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
        commits = journal.commits
        self._gauge("bytes", "Size of the journal on the disk.", lambda: commits.bytes)
        self._gauge("records", "Records that PostgreSQL does not have yet.", lambda: journal.waiting)
        self._gauge(
            "oldest_seconds",
            "Age of the oldest record that PostgreSQL does not have yet; 0 without one.",
            lambda: commits.oldest_unshipped_s(),
        )
        self._gauge("dead_letters", "Records that PostgreSQL rejected.", lambda: commits.dead_letters)
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


class AdmissionMetrics(AdmissionRecorder):
    """The `loraplex_admission_*` families and, as `journal`, those of the journal, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.journal = JournalMetrics(registry)
        self._registry = registry
        self._decisions = Counter(
            "loraplex_admission_decisions",
            "Requests by the decision of admission, and by the limit that refused them.",
            ("decision", "limit", "level"),
            registry=registry,
        )
        for decision in DECISIONS:
            self._decisions.labels(decision, NONE, NONE)
        self._seconds = self._times("loraplex_admission_seconds", "Added to a request before it begins.")
        self._ledger_seconds = self._times(
            "loraplex_admission_booked_seconds", "From the request to its reservation in the usage ledger."
        )
        self._settle_seconds = self._times(
            "loraplex_admission_settle_seconds", "Writing the usage of a request."
        )
        self._degraded_requests = self._counter(
            "degraded_requests", "Admitted by this gateway's share of the limits, without Valkey."
        )
        self._reserved = self._counter("reserved_tokens", "Tokens reserved by settled requests.")
        self._used = self._counter("used_tokens", "Tokens used by settled requests.")
        self._share = Histogram(
            "loraplex_admission_used_share",
            "Tokens used of those reserved, per request.",
            buckets=SHARE_BUCKETS,
            registry=registry,
        )

    def watch(self, admissions: QuotaAdmissionController) -> None:
        """Export whether admission works without Valkey now, how often Valkey did not know a script, and how often counters
        differed from the usage ledger.
        """
        self._gauge("degraded", "1 while admission works without Valkey.", lambda: admissions.degraded)
        self._gauge(
            "script_fallbacks",
            "Scripts sent with their text since the start, because Valkey did not know them.",
            lambda: admissions.counters.script_fallbacks,
        )
        self._gauge(
            "counters_mended",
            "Tenants whose counters were rebuilt since the start, because they differed from the usage ledger.",
            lambda: admissions.reconciliation.rebuilt,
        )

    def decided(self, decision: str, seconds: float, limit: str = NONE, level: str = NONE) -> None:
        """Count one decision. An unknown limit or level counts as none."""
        known = limit in COUNTED and level in get_args(Level)
        labels = (decision, limit, level) if known else (decision, NONE, NONE)
        self._decisions.labels(*labels).inc()
        self._seconds.observe(seconds)

    def ledger_written(self, seconds: float) -> None:
        """Count one reservation that is in the ledger, `seconds` after its request. The response is not sent earlier."""
        self._ledger_seconds.observe(seconds)

    def degraded(self) -> None:
        """Count one request that was admitted without Valkey."""
        self._degraded_requests.inc()

    def settled(self, reserved: int, used: int, seconds: float) -> None:
        """Count the tokens of one settled request."""
        self._settle_seconds.observe(seconds)
        self._reserved.inc(reserved)
        self._used.inc(used)
        if reserved:
            self._share.observe(used / reserved)

    def _times(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=ADMISSION_BUCKETS, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"loraplex_admission_{name}", text, registry=self._registry)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(f"loraplex_admission_{name}", text, registry=self._registry).set_function(value)
