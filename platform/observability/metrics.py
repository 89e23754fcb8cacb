"""Prometheus metrics of a gateway. `vllm:*` families have vLLM's names and buckets, for existing dashboards and routers.

Invariant: no label contains text from a client. Several gateways on one engine each export the engine's families: aggregate
those with `max by (engine)`.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from uuid import uuid4

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.adapter_names import AdapterNames
from loraplex.platform.observability.admission_metrics import AdmissionMetrics
from loraplex.platform.observability.billing_metrics import BillingMetrics
from loraplex.platform.observability.engine_metrics import EngineCollector
from loraplex.platform.observability.engine_minutes import EngineMinutes
from loraplex.platform.observability.http_metrics import HttpMetrics
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.platform.observability.usage_metrics import UsageMetrics
from loraplex.platform.observability.webhook_metrics import WebhookMetrics

FIRST_TOKEN_BUCKETS = (
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
    + (20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
)  # fmt: skip
TOKEN_BUCKETS = (
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
    + (10.0, 20.0, 40.0, 80.0)
)  # fmt: skip
REQUEST_BUCKETS = (
    (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
    + (240.0, 480.0, 960.0, 1920.0, 7680.0)
)  # fmt: skip
FINE_BUCKETS = tuple(0.001 * 2 ** (step / 2) for step in range(32))
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
COMPILE_CHECK_RESULTS = ("accepted", "invalid", "too_costly", "unavailable", "abandoned")
CONNECTION_BOUNDS = ("address", "total")
LABELS = ("model_name", "engine")


class Metrics:
    """The metrics of `/metrics`, and a `RequestRecorder`. Requests have the engine label "0", as in a single vLLM server.

    `adapter_names`: also export vLLM's series whose labels name adapters, as requests name them.
    """

    def __init__(
        self,
        model_name: str,
        version: str,
        max_model_len: int,
        engines: EnginePool,
        *,
        adapter_names: bool = False,
    ) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self._counter, self._gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._own_histogram = partial(Histogram, buckets=FINE_BUCKETS, registry=registry)
        self._labels = (model_name, "0")
        self._sizes = one_two_five(max_model_len)
        self._time_families()
        self._size_families()
        self._own_families(version)
        self.admission = AdmissionMetrics(registry)
        self.webhooks = WebhookMetrics(registry)
        self.billing = BillingMetrics(registry)
        self.http = HttpMetrics(registry)
        self.usage = UsageMetrics(registry)
        self.minutes = EngineMinutes(engines, uuid4())
        ProcessCollector(registry=registry)
        self._adapter_names = AdapterNames() if adapter_names else None
        registry.register(EngineCollector(model_name, engines, self._adapter_names))

    def record(self, stats: RequestStats) -> None:
        """Count one ended request."""
        reason = stats.finish_reason if stats.finish_reason in FINISH_REASONS else "error"
        self._success.labels(*self._labels, reason).inc()
        self._e2e.observe(stats.finished - stats.arrival)
        self._prompt.observe(stats.prompt_tokens)
        self._computed.observe(stats.prompt_tokens - stats.cached_tokens)
        self._max_tokens.observe(stats.max_tokens)
        self._choices.observe(stats.n)
        self._generated.observe(stats.completion_tokens)
        self._longest.observe(stats.largest_choice)
        self._resumptions.inc(stats.resumed)
        for gap in stats.token_gaps:
            self._between_tokens.observe(gap)
        if stats.queue_s is not None and stats.prefill_s is not None:
            self._observe_engine(stats, stats.queue_s, stats.prefill_s)
        if stats.first_token is not None and stats.last_token is not None:
            self._observe_tokens(stats, stats.first_token, stats.last_token)

    def record_adapter(self, digest: str, name: str) -> None:
        """See `RequestRecorder`."""
        if self._adapter_names is not None:
            self._adapter_names.record(digest, name)

    def record_decision(self, questions: Mapping[str, int], seconds: float) -> None:
        """See `RequestRecorder`."""
        self._decision_seconds.observe(seconds)
        for kind, count in questions.items():
            self._questions.labels(kind).inc(count)

    def record_compile_check(self, result: str, seconds: float) -> None:
        """Count one compile check of a grammar; see `CompileCheckRecorder`."""
        self._compile_checks.labels(result).inc()
        self._compile_check_seconds.observe(seconds)

    def set_dependency(self, name: str, up: bool) -> None:
        """Set whether PostgreSQL or Valkey responded to the last ping."""
        self._dependency.labels(name).set(up)

    def set_tasks(self, count: int) -> None:
        """Set how many asyncio tasks the gateway has."""
        self._tasks.set(count)

    def connection_refused(self, bound: str) -> None:
        """Count one connection over the bound `address` or `total`."""
        self._refused_connections.labels(bound).inc()

    def watch_connections(self, count: Callable[[], int]) -> None:
        """Export the number of open connections."""
        self._open_connections.set_function(count)

    def watch_prices(self, age_s: Callable[[], float]) -> None:
        """Export how long ago the gateway last knew that its prices are the newest, in seconds."""
        self._price_age.set_function(age_s)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _observe_tokens(self, stats: RequestStats, first: float, last: float) -> None:
        self._first_token.observe(first - stats.arrival)
        self._own_first_token.observe(first - stats.arrival)
        self._decode.observe(last - first)
        per_choice = stats.completion_tokens / stats.n
        if per_choice > 1:
            self._per_token.observe((last - first) / (per_choice - 1))

    def _observe_engine(self, stats: RequestStats, queue_s: float, prefill_s: float) -> None:
        self._queue.observe(queue_s)
        self._own_queue.observe(queue_s)
        self._prefill.observe(prefill_s)
        for waits, seconds in ((self._adapter_load, stats.adapter_s), (self._grammar_wait, stats.grammar_s)):
            if seconds:
                waits.observe(seconds)
        if stats.first_token is not None and stats.last_token is not None:
            self._inference.observe(prefill_s + stats.last_token - stats.first_token)

    def _time_families(self) -> None:
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between tokens.", TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token after the first.",
            TOKEN_BUCKETS,
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS)
        self._queue = self._histogram("request_queue_time_seconds", "Receipt to first step.", REQUEST_BUCKETS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", REQUEST_BUCKETS
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "First step to last token.", REQUEST_BUCKETS
        )
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", REQUEST_BUCKETS)

    def _size_families(self) -> None:
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", self._sizes)
        self._generated = self._histogram(
            "request_generation_tokens", "Tokens a request generated.", self._sizes
        )
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", self._sizes
        )
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", self._sizes
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "The parameter max_tokens.", self._sizes
        )
        self._choices = self._histogram("request_params_n", "The parameter n.", CHOICE_BUCKETS)
        self._success = self._counter("vllm:request_success", "Ended requests.", (*LABELS, "finished_reason"))
        for reason in FINISH_REASONS:
            self._success.labels(*self._labels, reason)

    def _own_families(self, version: str) -> None:
        self._own_first_token = self._own_histogram(
            "loraplex_time_to_first_token_seconds", "Arrival to first token, in finer steps."
        )
        self._own_queue = self._own_histogram(
            "loraplex_request_queue_seconds", "Receipt by the engine to first step, in finer steps."
        )
        self._adapter_load = self._own_histogram(
            "loraplex_adapter_load_seconds", "Wait of a request for its adapter to be loaded."
        )
        self._grammar_wait = self._own_histogram(
            "loraplex_grammar_wait_seconds", "Wait of a request for its grammar in the engine."
        )
        self._resumptions = self._counter(
            "loraplex_request_resumptions", "Times that another engine went on with a request."
        )
        self._compile_checks = self._counter(
            "loraplex_grammar_trials",
            "Requested grammars by the result of their compile check, cached results included.",
            ("result",),
        )
        for result in COMPILE_CHECK_RESULTS:
            self._compile_checks.labels(result)
        self._compile_check_seconds = self._own_histogram(
            "loraplex_grammar_trial_seconds", "Wait for a compile check."
        )
        self._questions = self._counter("loraplex_decision_questions", "Answered questions.", ("type",))
        for kind in ("predicate", "choice", "score"):
            self._questions.labels(kind)
        self._decision_seconds = self._own_histogram("loraplex_decision_seconds", "Arrival to all answers.")
        self._dependency = self._gauge("loraplex_dependency_up", "1 while it responds.", ("dependency",))
        self._tasks = self._gauge("loraplex_asyncio_tasks", "Tasks of the gateway's event loop.")
        self._open_connections = self._gauge("loraplex_http_connections", "Open client connections.")
        self._price_age = self._gauge(
            "loraplex_price_age_seconds",
            "Since this gateway last compared its prices with the rate cards in PostgreSQL.",
        )
        self._refused_connections = self._counter(
            "loraplex_http_connections_refused", "Connections that a bound refused or ended.", ("bound",)
        )
        for bound in CONNECTION_BOUNDS:
            self._refused_connections.labels(bound)
        self._gauge("loraplex_build_info", "The running version.", ("version",)).labels(version).set(1)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(*self._labels)


def one_two_five(limit: int) -> tuple[float, ...]:
    """Bucket bounds 1, 2, 5, 10, … up to `limit`."""
    decades = range(int(math.log10(max(limit, 1))) + 1)
    return tuple(float(m * 10**d) for d in decades for m in (1, 2, 5) if m * 10**d <= limit)
