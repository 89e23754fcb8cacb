"""Prometheus metrics in a registry of their own. Names and buckets of `vllm:*` families are vLLM's, so that existing
dashboards and routers work; `loraplex_*` families are ours. No label holds anything a client sent.

With several gateways on one engine each exports the engine's families: aggregate those with `max by (engine)`.
"""

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.admission_metrics import AdmissionMetrics
from loraplex.platform.observability.engine_metrics import EngineCollector
from loraplex.platform.observability.request_stats import RequestStats

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
TRIAL_RESULTS = ("accepted", "invalid", "too_costly", "unavailable", "abandoned")
LABELS = ("model_name", "engine")


class Metrics:
    """A `RequestRecorder` and everything `/metrics` shows. Requests carry engine label "0", as one vLLM server's do."""

    def __init__(self, model_name: str, version: str, max_model_len: int, engines: EnginePool) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._labels = (model_name, "0")
        self._sizes = one_two_five(max_model_len)
        self._time_families()
        self._size_families()
        self._own_families(version)
        self.admission = AdmissionMetrics(self.registry)
        self.registry.register(EngineCollector(model_name, engines))

    def record(self, timings: RequestStats) -> None:
        """Count one ended request."""
        reason = timings.finish_reason if timings.finish_reason in FINISH_REASONS else "error"
        self._success.labels(*self._labels, reason).inc()
        self._e2e.observe(timings.finished - timings.arrival)
        self._prompt.observe(timings.prompt_tokens)
        self._computed.observe(timings.prompt_tokens - timings.cached_tokens)
        self._max_tokens.observe(timings.max_tokens)
        self._choices.observe(timings.n)
        self._generated.observe(timings.completion_tokens)
        self._longest.observe(timings.largest_choice)
        for gap in timings.token_gaps:
            self._between_tokens.observe(gap)
        if timings.queue_s is not None and timings.prefill_s is not None:
            self._observe_engine(timings, timings.queue_s, timings.prefill_s)
        if timings.first_token is not None and timings.last_token is not None:
            self._observe_tokens(timings, timings.first_token, timings.last_token)

    def record_trial(self, result: str, seconds: float) -> None:
        """Count one check of a grammar; see `CompileCheckRecorder`."""
        self._trials.labels(result).inc()
        self._trial_seconds.observe(seconds)

    def set_dependency(self, name: str, up: bool) -> None:
        """Note whether PostgreSQL or Valkey answered last."""
        self._dependency.labels(name).set(up)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _observe_tokens(self, timings: RequestStats, first: float, last: float) -> None:
        self._first_token.observe(first - timings.arrival)
        self._own_first_token.observe(first - timings.arrival)
        self._decode.observe(last - first)
        per_choice = timings.completion_tokens / timings.n
        if per_choice > 1:
            self._per_token.observe((last - first) / (per_choice - 1))

    def _observe_engine(self, timings: RequestStats, queue_s: float, prefill_s: float) -> None:
        self._queue.observe(queue_s)
        self._own_queue.observe(queue_s)
        self._prefill.observe(prefill_s)
        if timings.first_token is not None and timings.last_token is not None:
            self._inference.observe(prefill_s + timings.last_token - timings.first_token)

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
        self._success = Counter(
            "vllm:request_success", "Ended requests.", (*LABELS, "finished_reason"), registry=self.registry
        )
        for reason in FINISH_REASONS:
            self._success.labels(*self._labels, reason)

    def _own_families(self, version: str) -> None:
        self._own_first_token = Histogram(
            "loraplex_time_to_first_token_seconds",
            "Arrival to first token, in finer steps.",
            buckets=FINE_BUCKETS,
            registry=self.registry,
        )
        self._own_queue = Histogram(
            "loraplex_request_queue_seconds",
            "Receipt by the engine to first step, in finer steps.",
            buckets=FINE_BUCKETS,
            registry=self.registry,
        )
        self._trials = Counter(
            "loraplex_grammar_trials",
            "Grammars asked for, by what their trial compilation said; remembered verdicts count.",
            ("result",),
            registry=self.registry,
        )
        for result in TRIAL_RESULTS:
            self._trials.labels(result)
        self._trial_seconds = Histogram(
            "loraplex_grammar_trial_seconds",
            "Wait for a trial compilation.",
            buckets=FINE_BUCKETS,
            registry=self.registry,
        )
        self._dependency = Gauge(
            "loraplex_dependency_up", "1 while it answers.", ("dependency",), registry=self.registry
        )
        build = Gauge("loraplex_build_info", "The running version.", ("version",), registry=self.registry)
        build.labels(version).set(1)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(*self._labels)


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to `limit`."""
    decades = range(int(math.log10(max(limit, 1))) + 1)
    return tuple(float(m * 10**d) for d in decades for m in (1, 2, 5) if m * 10**d <= limit)
