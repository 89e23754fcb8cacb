"""Admission as metrics: decisions, durations and ledger writes. Labels come from closed sets: limits, levels and outcomes."""

from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from loraplex.platform.observability.journal_metrics import JournalMetrics
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.admission.recording import NONE, AdmissionRecorder
from loraplex.tenants.quotas.limits import COUNTED, Level

DECISIONS: Final = ("admitted", "rate_limited", "exhausted", "unavailable", "stale", "unpriced")
ADMISSION_BUCKETS: Final = (
    *(0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
SHARE_BUCKETS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


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
        self._degraded_requests = Counter(
            "loraplex_admission_degraded_requests",
            "Admitted by this gateway's share of the limits, without Valkey.",
            registry=registry,
        )
        self._reserved = self._tokens("reserved", "Tokens reserved by settled requests.")
        self._used = self._tokens("used", "Tokens used by settled requests.")
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
        degraded = Gauge(
            "loraplex_admission_degraded", "1 while admission works without Valkey.", registry=self._registry
        )
        degraded.set_function(lambda: float(admissions.degraded))
        fallbacks = Gauge(
            "loraplex_admission_script_fallbacks",
            "Scripts sent with their text since the start, because Valkey did not know them.",
            registry=self._registry,
        )
        fallbacks.set_function(lambda: float(admissions.counters.script_fallbacks))
        rebuilt = Gauge(
            "loraplex_admission_counters_mended",
            "Tenants whose counters were rebuilt since the start, because they differed from the usage ledger.",
            registry=self._registry,
        )
        rebuilt.set_function(lambda: float(admissions.reconciliation.rebuilt))

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

    def _tokens(self, kind: str, text: str) -> Counter:
        return Counter(f"loraplex_admission_{kind}_tokens", text, registry=self._registry)
