"""Metrics of admission: decisions by limit, durations and tokens; no label from a client."""

import asyncio
from uuid import UUID, uuid4

import pytest
from prometheus_client import CollectorRegistry
from tests.platform.fake_admissions import FakeAdmissions

from loraplex.platform.observability.admission_metrics import AdmissionMetrics, RecordedAdmissionController
from loraplex.tenants.api_keys.keys import AuthenticatedKey
from loraplex.tenants.errors import PolicyStale, QuotaExhausted, RateLimited, ValkeyUnavailable
from loraplex.tenants.ids import uuid7
from loraplex.tenants.quotas.reservation import ReservationRequest, SettledUsage


def request() -> ReservationRequest:
    key = AuthenticatedKey(
        api_key_id=uuid4(),
        key_id="k",
        environment="live",
        secret_sha256=bytes(32),
        scopes=[],
        allowed_cidrs=[],
        expires_at=None,
        revoked_at=None,
        tenant_id=UUID(int=1),
        tenant_name="acme",
        weight=1.0,
        tier="standard",
        suspended_at=None,
        policy_epoch=1,
    )
    return ReservationRequest(id=uuid7(), request_id="r", key=key, prompt_tokens=30, completion_tokens=70)


async def test_the_measured_wait_ends_when_work_may_start() -> None:
    registry, fake = CollectorRegistry(), FakeAdmissions()
    recorded, provisional = RecordedAdmissionController(fake, AdmissionMetrics(registry)), list[str]()

    async def slowly() -> None:
        await asyncio.sleep(0.06)

    fake.before_confirmation = slowly
    await recorded.admit(request(), lambda: provisional.append("admitted"))
    assert provisional == ["admitted"]
    waited = registry.get_sample_value("loraplex_admission_seconds_sum", {})
    ledger_s = registry.get_sample_value("loraplex_admission_booked_seconds_sum", {})
    assert waited is not None and ledger_s is not None and ledger_s - waited >= 0.05


async def test_decisions_and_tokens() -> None:
    registry, fake = CollectorRegistry(), FakeAdmissions()
    recorded = RecordedAdmissionController(fake, AdmissionMetrics(registry))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"loraplex_admission_{name}", labels)

    admission = await recorded.admit(request())
    usage = SettledUsage(outcome="completed", prompt_tokens=30, cached_tokens=0, completion_tokens=20)
    await recorded.settle(admission, usage)
    await recorded.cancel(admission)
    assert fake.settled == [(admission, usage)] and fake.cancelled == [admission]
    limited = RateLimited("", limit="tokens_per_minute", level="key", limit_value=1, retry_after_s=1)
    foreign = QuotaExhausted("", limit="canary", level="tenant", limit_value=1, retry_after_s=None)
    for refusal in (limited, foreign, PolicyStale(""), ValkeyUnavailable("")):
        fake.refusals = [refusal]
        with pytest.raises(type(refusal)):
            await recorded.admit(request())
    none = {"limit": "none", "level": "none"}
    assert value("decisions_total", decision="admitted", **none) == 1
    assert value("decisions_total", decision="rate_limited", limit="tokens_per_minute", level="key") == 1
    assert [value("decisions_total", decision=each, **none) for each in ("exhausted", "stale", "unavailable")]
    assert value("seconds_count") == 5 and value("booked_seconds_count") == 1
    assert (value("reserved_tokens_total"), value("used_tokens_total")) == (100, 50)
    assert value("used_share_bucket", le="0.4") == 0 and value("used_share_bucket", le="0.5") == 1
    assert (value("seconds_count"), value("settle_seconds_count")) == (5, 1)
    fake.degraded = True
    await recorded.admit(request())
    assert value("degraded_requests_total") == 1
