"""Drift of billing as metrics: by how much sums differ from the rows of the ledger. Labels come from a closed set."""

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

COUNTERS: Final = "counters"
COMPARED: Final = ("rollups", "monthly_rollups", "totals", "invoices", COUNTERS)


class BillingMetrics:
    """The `loraplex_billing_*` families, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._drift = Gauge(
            "loraplex_billing_drift_pico",
            "Sizes of all differences that were found and still exist, in pico-units of money; 0 if sums and rows agree.",
            ("compared",),
            registry=registry,
        )
        self._differing = Gauge(
            "loraplex_billing_differences",
            "Sums that differ from the rows of the ledger, in amounts or in tokens.",
            ("compared",),
            registry=registry,
        )
        for compared in COMPARED:
            self._drift.labels(compared)
            self._differing.labels(compared)

    def drifted(self, compared: str, drift_pico: int, differing: int) -> None:
        """Export what was found of one kind of sums: of `COMPARED`."""
        self._drift.labels(compared).set(drift_pico)
        self._differing.labels(compared).set(differing)

    def watch_counters(self, drifts_pico: Callable[[], tuple[int, ...]]) -> None:
        """Export the drifts of the quota counters, one for each tenant that has one, at each scrape."""
        self._drift.labels(COUNTERS).set_function(lambda: sum(drifts_pico()))
        self._differing.labels(COUNTERS).set_function(lambda: len(drifts_pico()))
