"""Webhooks as metrics: results of attempts, and the age of what waits. Labels come from a closed set."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

RESULTS: Final = ("delivered", "failed", "dead")


class WebhookMetrics:
    """The families of webhooks, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._deliveries = Counter(
            "loraplex_webhook_deliveries",
            "Attempts to deliver an event: received, to be repeated, or given up.",
            ("result",),
            registry=registry,
        )
        for result in RESULTS:
            self._deliveries.labels(result)
        self._oldest = Gauge(
            "loraplex_outbox_oldest_seconds",
            "Age of the oldest event or due delivery that waits.",
            registry=registry,
        )
        self._oldest_meter_event = Gauge(
            "loraplex_meter_export_oldest_seconds",
            "Age of the oldest meter event that was not exported.",
            registry=registry,
        )

    def attempted(self, result: str, count: int = 1) -> None:
        """Count attempts with one of `RESULTS`."""
        self._deliveries.labels(result).inc(count)

    def set_oldest(self, seconds: float) -> None:
        """Set the age of what waits longest."""
        self._oldest.set(seconds)

    def set_oldest_meter_event(self, seconds: float) -> None:
        """Set the age of the oldest meter event that was not exported."""
        self._oldest_meter_event.set(seconds)
