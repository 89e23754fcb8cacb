"""Responses count by route, method and class of status; streams that break after their first byte count apart."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loraplex.platform.observability.http_metrics import HttpMetrics
from loraplex.platform.observability.request_record import GENERATING, FinishedRequest, RequestRecord
from loraplex.platform.observability.request_stats import RequestStats

CHAT = "/v1/chat/completions"


def ended(status: int | None, reason: str | None = None, method: str = "POST") -> FinishedRequest:
    record = RequestRecord()
    if reason is not None:
        record.stats = RequestStats(arrival=0.0, n=1, max_tokens=1, prompt_lengths=[1], finish_reason=reason)
    scope: Any = {"type": "http", "method": method, "state": {}}
    return FinishedRequest(scope=scope, record=record, handler=CHAT, began=0.0, ended=1.0, status=status)


def test_requests_count_by_class_of_status_and_begin_at_zero() -> None:
    registry = CollectorRegistry(auto_describe=True)
    metrics = HttpMetrics(registry)

    def count(status: str, handler: str = CHAT, method: str = "POST") -> float | None:
        return registry.get_sample_value(
            "http_requests_total", {"handler": handler, "method": method, "status": status}
        )

    for handler in GENERATING:
        assert [count(status, handler) for status in ("2xx", "4xx", "5xx")] == [0, 0, 0]
    for finished in (ended(200), ended(404), ended(429), ended(503), ended(None), ended(405, method="PURGE")):
        metrics.record(finished)
    assert [count(status) for status in ("2xx", "4xx", "5xx", "none")] == [1, 2, 1, 1]
    assert count("4xx", method="other") == 1


@pytest.mark.parametrize(
    ("status", "reason", "broken"),
    [(200, "error", 1), (200, "stop", 0), (200, "abort", 0), (500, "error", 0), (200, None, 0)],
)
def test_streams_that_broke_count_apart(status: int, reason: str | None, broken: int) -> None:
    registry = CollectorRegistry(auto_describe=True)
    HttpMetrics(registry).record(ended(status, reason))
    assert registry.get_sample_value("loraplex_streams_failed_total") == broken
