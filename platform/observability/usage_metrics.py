"""Requests and tokens by tenant and by adapter, for the most recent of them. Labels are ids of the registry, never names.

Invariant: at most `TOP` series of a kind, and one for all others; what an id has counted never moves to another label.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.platform.observability.request_record import GENERATING, FinishedRequest

TOP: Final = 50
IDLE_S: Final = 900.0
OTHER: Final = "other"
BASE: Final = "base"
"""The adapter label of requests that use none."""
TOO_MANY_REQUESTS: Final = 429


@dataclass(slots=True)
class Counts:
    """Sums of one label since it has a series."""

    requests: int = 0
    refused: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    used_at: float = 0.0

    def add(self, finished: FinishedRequest) -> None:
        """Count one request."""
        stats, status = finished.record.stats, finished.status
        self.requests += 1
        self.refused += status == TOO_MANY_REQUESTS
        self.failed += status is not None and status >= 500
        if stats is not None:
            self.prompt_tokens += stats.prompt_tokens
            self.cached_tokens += stats.cached_tokens
            self.completion_tokens += stats.completion_tokens
            self.reasoning_tokens += stats.reasoning_tokens


class TopCounts:
    """The counts of up to `top` labels. A new one takes the place of that which is idle longest, if for `IDLE_S`; else it counts
    as `OTHER`.
    """

    def __init__(self, top: int = TOP, clock: Callable[[], float] = time.monotonic) -> None:
        self._top = top
        self._clock = clock
        self._counts: OrderedDict[str, Counts] = OrderedDict()
        self._other = Counts()

    def of(self, label: str) -> Counts:
        """The counts to which a request of `label` adds."""
        now = self._clock()
        if label not in self._counts:
            if len(self._counts) >= self._top:
                oldest = next(iter(self._counts))
                if now - self._counts[oldest].used_at < IDLE_S:
                    return self._other
                del self._counts[oldest]
            self._counts[label] = Counts()
        self._counts.move_to_end(label)
        counts = self._counts[label]
        counts.used_at = now
        return counts

    def items(self) -> list[tuple[str, Counts]]:
        """All labels with their counts, `OTHER` last."""
        return [*self._counts.copy().items(), (OTHER, self._other)]


class UsageMetrics(Collector):
    """An observer of requests that exports the families `loraplex_tenant_*` and `loraplex_adapter_*` of what they used."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._tenants = TopCounts(clock=clock)
        self._adapters = TopCounts(clock=clock)
        registry.register(self)

    def record(self, finished: FinishedRequest) -> None:
        """Count a request that an authenticated tenant sent to generate."""
        if finished.tenant_id is None or finished.handler not in GENERATING:
            return
        self._tenants.of(str(finished.tenant_id)).add(finished)
        if finished.record.stats is not None:
            self._adapters.of(_label(finished.record.adapter_id)).add(finished)

    def collect(self) -> Iterable[Metric]:
        """All families. Runs on a thread: the event loop may count meanwhile."""
        for kind, counts in (("tenant", self._tenants.items()), ("adapter", self._adapters.items())):
            for field, name, text in (
                ("requests", "requests", "Requests to generate."),
                ("refused", "refused_requests", "Those that a limit refused."),
                ("failed", "failed_requests", "Those that failed in the server."),
            ):
                samples = [([label], getattr(each, field)) for label, each in counts]
                yield _family(f"loraplex_{kind}_{name}", text, [kind], samples)
            yield _family(
                f"loraplex_{kind}_tokens",
                "Tokens that requests used; `prompt` includes `cached`, `completion` includes `reasoning`.",
                [kind, "class"],
                (
                    ([label, token_class], getattr(each, f"{token_class}_tokens"))
                    for label, each in counts
                    for token_class in ("prompt", "cached", "completion", "reasoning")
                ),
            )


def _label(adapter_id: UUID | None) -> str:
    return BASE if adapter_id is None else str(adapter_id)


def _family(name: str, text: str, labels: list[str], samples: Iterable[tuple[list[str], int]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
