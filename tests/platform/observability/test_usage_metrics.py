"""Usage by tenant and adapter has a bounded number of series, and no count ever moves or falls."""

from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from loraplex.engine.messages import Finished, Started, Usage
from loraplex.platform.observability.request_record import FinishedRequest, RequestRecord
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.platform.observability.usage_metrics import IDLE_S, TOP, TopCounts, UsageMetrics

CHAT = "/v1/chat/completions"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(
    tenant_id: UUID | None,
    *,
    status: int | None = 200,
    adapter_id: UUID | None = None,
    tokens: int = 0,
    handler: str = CHAT,
) -> FinishedRequest:
    record = RequestRecord(adapter_id=adapter_id)
    if tokens:
        record.stats = RequestStats(arrival=0.0, n=1, max_tokens=tokens, prompt_lengths=[10])
        record.stats.see(0, Started("r", None, 4))
        record.stats.see(0, Finished("r", 0, "stop", Usage(10, 4, tokens)))
    scope: Any = {"type": "http", "method": "POST", "state": {"tenant_id": tenant_id}}
    return FinishedRequest(scope=scope, record=record, handler=handler, began=0.0, ended=1.0, status=status)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry(auto_describe=True)


@pytest.fixture
def usage(registry: CollectorRegistry, clock: Clock) -> UsageMetrics:
    return UsageMetrics(registry, clock)


def series(registry: CollectorRegistry) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sample.labels.items()))
        for family in registry.collect()
        for sample in family.samples
    }


def test_requests_and_tokens_of_a_tenant_and_its_adapter(
    registry: CollectorRegistry, usage: UsageMetrics
) -> None:
    tenant, adapter = uuid4(), uuid4()
    for finished in (
        request(tenant, tokens=5, adapter_id=adapter),
        request(tenant, tokens=3),
        request(tenant, status=429),
        request(tenant, status=503),
        request(tenant, status=None),
        request(None, status=401),
        request(tenant, handler="/v1/models"),
    ):
        usage.record(finished)

    def of(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    owner = str(tenant)
    assert of("loraplex_tenant_requests_total", tenant=owner) == 5
    assert of("loraplex_tenant_refused_requests_total", tenant=owner) == 1
    assert of("loraplex_tenant_failed_requests_total", tenant=owner) == 1
    found = {
        each: of("loraplex_tenant_tokens_total", tenant=owner, **{"class": each})
        for each in ("prompt", "cached")
    }
    assert found == {"prompt": 20, "cached": 8}
    assert of("loraplex_tenant_tokens_total", tenant=owner, **{"class": "completion"}) == 8
    assert of("loraplex_adapter_tokens_total", adapter=str(adapter), **{"class": "completion"}) == 5
    assert of("loraplex_adapter_requests_total", adapter="base") == 1
    assert of("loraplex_tenant_requests_total", tenant="other") == 0


def test_ten_thousand_tenants_and_adapters_have_as_many_series_as_the_first_ones(
    registry: CollectorRegistry, usage: UsageMetrics
) -> None:
    for _ in range(TOP):
        usage.record(request(uuid4(), tokens=1, adapter_id=uuid4()))
    before = series(registry)
    for _ in range(10_000):
        usage.record(request(uuid4(), tokens=1, adapter_id=uuid4()))
    assert series(registry) == before
    assert registry.get_sample_value("loraplex_tenant_requests_total", {"tenant": "other"}) == 10_000


def test_a_new_tenant_takes_the_place_of_an_idle_one(
    registry: CollectorRegistry, usage: UsageMetrics, clock: Clock
) -> None:
    tenants = [uuid4() for _ in range(TOP + 1)]
    for tenant in tenants:
        usage.record(request(tenant))
    clock.now = IDLE_S
    usage.record(request(tenants[0]))
    usage.record(request(tenants[-1]))
    shown = {labels["tenant"] for name, each in series(registry) if "tenant" in (labels := dict(each))}
    assert {str(tenants[0]), str(tenants[-1]), "other"} <= shown
    assert str(tenants[1]) not in shown and len(shown) == TOP + 1


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 2 * IDLE_S)), max_size=60))
def test_no_request_is_lost_while_no_series_ends(steps: list[tuple[int, float]]) -> None:
    clock = Clock()
    counts = TopCounts(3, clock)
    ended = 0
    for number, seconds in steps:
        clock.now += seconds
        before = dict(counts.items())
        counts.of(str(number)).requests += 1
        after = dict(counts.items())
        assert len(after) <= 4
        ended += sum(each.requests for label, each in before.items() if label not in after)
    assert sum(each.requests for _, each in counts.items()) + ended == len(steps)
