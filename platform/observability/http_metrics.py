"""Responses by route, under the name and the labels that vLLM's API server exports. Labels come from closed sets."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter

from loraplex.platform.observability.request_record import GENERATING, FinishedRequest

NO_RESPONSE: Final = "none"
OK: Final = 200
FAILED: Final = "error"
CLASSES: Final = ("2xx", "4xx", "5xx")


class HttpMetrics:
    """An observer of requests: the families `http_requests` and `loraplex_streams_failed`, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            "Requests by the path of their route, method and class of status.",
            ("handler", "method", "status"),
            registry=registry,
        )
        # Without a zero before it, no rate would show the first failure.
        for handler in GENERATING:
            for status in CLASSES:
                self._requests.labels(handler, "POST", status)
        self._streams_failed = Counter(
            "loraplex_streams_failed",
            "Streams that ended with an error after their first byte, and so with status 200.",
            registry=registry,
        )

    def record(self, finished: FinishedRequest) -> None:
        """Count one request; a client that left before any response has the status `none`."""
        status = NO_RESPONSE if finished.status is None else f"{finished.status // 100}xx"
        self._requests.labels(finished.handler, finished.method, status).inc()
        stats = finished.record.stats
        if stats is not None and stats.finish_reason == FAILED and finished.status == OK:
            self._streams_failed.inc()
