"""Responses by route, under the name and the labels that vLLM's API server exports. Labels come from closed sets."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter

from loraplex.platform.observability.request_record import FinishedRequest

NO_RESPONSE: Final = "none"


class HttpMetrics:
    """An observer of requests: the family `http_requests`, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            "Requests by the path of their route, method and class of status.",
            ("handler", "method", "status"),
            registry=registry,
        )

    def record(self, finished: FinishedRequest) -> None:
        """Count one request; a client that left before any response has the status `none`."""
        status = NO_RESPONSE if finished.status is None else f"{finished.status // 100}xx"
        self._requests.labels(finished.handler, finished.method, status).inc()
