"""Metrics of admission: decisions by limit, durations and tokens; no label from a client."""

import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loraplex.platform.observability.admission_metrics import AdmissionMetrics
from loraplex.tenants.admission.recording import MeasuredAdmission
from loraplex.tenants.errors import PolicyStale, PriceMissing, QuotaExhausted, RateLimited, ValkeyUnavailable


def test_the_measured_wait_ends_when_work_may_start() -> None:
    registry, provisional = CollectorRegistry(), list[str]()
    metrics = AdmissionMetrics(registry)
    with MeasuredAdmission(metrics, lambda: provisional.append("admitted")) as measured:
        measured.on_provisional()
        time.sleep(0.06)
    assert provisional == ["admitted"]
    waited = registry.get_sample_value("loraplex_admission_seconds_sum", {})
    ledger_s = registry.get_sample_value("loraplex_admission_booked_seconds_sum", {})
    assert waited is not None and ledger_s is not None and ledger_s - waited >= 0.05


def test_decisions_and_tokens() -> None:
    registry = CollectorRegistry()
    metrics = AdmissionMetrics(registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"loraplex_admission_{name}", labels)

    def admit(error: Exception | None = None, degraded: bool = False) -> None:
        with MeasuredAdmission(metrics, None) as measured:
            measured.degraded = degraded
            if error is not None:
                raise error

    admit()
    metrics.settled(100, 50, 0.001)
    limited: Any = {"limit_value": 1, "retry_after_s": 1}
    refusals = (
        RateLimited("", limit="tokens_per_minute", level="key", **limited),
        QuotaExhausted("", limit="canary", level="tenant", **limited),
        PolicyStale(""),
        ValkeyUnavailable(""),
        PriceMissing(""),
    )
    for refusal in refusals:
        with pytest.raises(type(refusal)):
            admit(refusal)
    none = {"limit": "none", "level": "none"}
    assert value("decisions_total", decision="admitted", **none) == 1
    assert value("decisions_total", decision="rate_limited", limit="tokens_per_minute", level="key") == 1
    assert [
        value("decisions_total", decision=each, **none)
        for each in ("exhausted", "stale", "unavailable", "unpriced")
    ]
    assert value("seconds_count") == 6 and value("booked_seconds_count") == 1
    assert (value("reserved_tokens_total"), value("used_tokens_total")) == (100, 50)
    assert value("used_share_bucket", le="0.4") == 0 and value("used_share_bucket", le="0.5") == 1
    assert (value("seconds_count"), value("settle_seconds_count")) == (6, 1)
    admit(degraded=True)
    assert value("degraded_requests_total") == 1
