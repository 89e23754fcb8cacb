"""Converts the engines' snapshots into metric families at scrape time; earlier label sets are not kept.

Invariant: a counter never decreases, although a restarted engine counts from zero.
"""

import time
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.messages import STEP_TOKEN_BOUNDS, EngineStats
from loraplex.platform.engines.poison_memory import KINDS
from loraplex.platform.engines.pool import EnginePool, ObservedEngine
from loraplex.platform.observability.adapter_names import AdapterNames

LABELS: Final = ["model_name", "engine"]

COUNTERS: Final = (
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens processed."),
    ("vllm:generation_tokens", "generation_tokens", "Tokens generated."),
    ("vllm:prompt_tokens_cached", "cached_prompt_tokens", "Prompt tokens found in the prefix cache."),
    ("vllm:prefix_cache_queries", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_cache_hits", "Tokens found in the prefix cache."),
    ("vllm:num_preemptions", "preemptions", "Rows preempted by recomputation."),
    ("vllm:corrupted_requests", "corrupted_requests", "Requests with non-finite logits."),
    ("loraplex_adapter_evictions", "adapter_evictions", "Adapters evicted from the device."),
    (
        "loraplex_adapter_host_hits",
        "adapter_host_hits",
        "Adapter loads that found their blob in host memory.",
    ),
    ("loraplex_aborted_requests", "aborted_requests", "Requests aborted by their client."),
    ("loraplex_grammar_compilations", "grammar_compilations", "Grammars compiled by the engine."),
    ("loraplex_grammar_compile_seconds", "grammar_compile_seconds", "Seconds spent compiling them."),
    ("loraplex_grammar_failures", "grammar_failures", "Requests ended by a failure of their grammar."),
    ("loraplex_grammar_mask_seconds", "mask_seconds", "Seconds spent filling masks."),
    ("loraplex_grammar_late_masks", "late_masks", "Rows that skipped a step, because their mask was late."),
    (
        "loraplex_grammar_forced_tokens",
        "forced_tokens",
        "Tokens that were the only ones their grammar allowed.",
    ),
    ("loraplex_engine_steps", "steps", "Steps of the engine."),
    ("loraplex_engine_step_seconds", "step_seconds", "Seconds spent in steps."),
    ("loraplex_engine_slow_steps", "slow_steps", "Steps that took longer than 10 s."),
)
SPLIT_COUNTERS: Final = (
    (
        "vllm:admission_rejections",
        "reason",
        "Requests refused at admission.",
        (("queue_full", "admission_rejections"),),
    ),
    (
        "loraplex_adapter_loads",
        "result",
        "Adapter loads to the device.",
        (("ok", "adapter_loads"), ("failed", "adapter_load_failures")),
    ),
    (
        "loraplex_step_bytes",
        "part",
        "Bytes that steps read of the device's memory.",
        (("weights", "step_weight_bytes"), ("kv", "step_kv_bytes"), ("adapters", "step_adapter_bytes")),
    ),
)
GAUGES: Final = (
    ("vllm:num_requests_running", "running", "Requests in the running batch."),
    ("vllm:num_requests_waiting", "waiting", "Requests waiting."),
    ("loraplex_requests_waiting_for_grammar", "waiting_for_grammar", "Requests whose grammar is compiled."),
    ("loraplex_adapters_pinned", "pinned_adapters", "Resident adapters in use."),
    ("loraplex_adapter_resident_bytes", "adapter_bytes", "Device bytes of resident adapters."),
    ("loraplex_adapter_budget_bytes", "adapter_budget_bytes", "Device bytes adapters may take."),
    ("loraplex_adapter_waste_bytes", "adapter_waste_bytes", "Device bytes between pages of adapters."),
    ("loraplex_adapter_host_bytes", "adapter_host_bytes", "Host memory of adapters that may come back."),
    (
        "loraplex_adapter_page_error",
        "adapter_page_error",
        "Greatest error of 8-bit pages to a resident module.",
    ),
    ("loraplex_kv_blocks_free", "free_blocks", "Empty KV blocks."),
    ("loraplex_kv_blocks_cached", "cached_blocks", "KV blocks kept for reuse, evictable."),
    ("loraplex_kv_blocks_referenced", "referenced_blocks", "KV blocks in use."),
    (
        "loraplex_memory_rate_bytes",
        "memory_rate",
        "Bytes per second at which the device's memory was read at the engine's start.",
    ),
    (
        "loraplex_engine_step_age_seconds",
        "heartbeat_age_s",
        "Seconds since the last step, while there is work.",
    ),
)


class EngineCollector(Collector):
    """Reads the newest snapshot of every engine and never waits for an engine."""

    def __init__(
        self, model_name: str, engines: EnginePool, adapter_names: AdapterNames | None = None
    ) -> None:
        self._model_name = model_name
        self._engines = engines
        self._adapter_names = adapter_names
        self._seen: dict[tuple[str, str], float] = {}
        self._base: dict[tuple[str, str], float] = {}

    def collect(self) -> Iterable[Metric]:
        """All families, each with one sample per engine."""
        snapshots = [
            (str(i), engine.last_stats or EngineStats()) for i, engine in self._engines.observed().items()
        ]
        yield from self._counters(snapshots)
        yield from self._split_counters(snapshots)
        yield from self._gauges(snapshots)
        yield from self._process_families()
        yield self._engines_wanted(snapshots)
        yield self._poison_refusals()
        yield self._step_tokens(snapshots)
        yield self._cache_config()
        yield from self._adapters(snapshots)
        if self._adapter_names is not None:
            yield self._lora_info(snapshots, self._adapter_names)

    def _counters(self, snapshots: list[tuple[str, EngineStats]]) -> Iterable[Metric]:
        for name, field, text in COUNTERS:
            family = CounterMetricFamily(name, text, labels=LABELS)
            for engine, stats in snapshots:
                family.add_metric([self._model_name, engine], self._total(engine, field, stats))
            yield family

    def _split_counters(self, snapshots: list[tuple[str, EngineStats]]) -> Iterable[Metric]:
        for name, label, text, parts in SPLIT_COUNTERS:
            family = CounterMetricFamily(name, text, labels=[*LABELS, label])
            for engine, stats in snapshots:
                for value, field in parts:
                    family.add_metric([self._model_name, engine, value], self._total(engine, field, stats))
            yield family
        yield self._prompt_sources(snapshots)

    def _prompt_sources(self, snapshots: list[tuple[str, EngineStats]]) -> Metric:
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by origin.", labels=[*LABELS, "source"]
        )
        for engine, stats in snapshots:
            total = self._total(engine, "prompt_tokens", stats)
            cached = self._total(engine, "cached_prompt_tokens", stats)
            family.add_metric([self._model_name, engine, "local_compute"], total - cached)
            family.add_metric([self._model_name, engine, "local_cache_hit"], cached)
        return family

    def _gauges(self, snapshots: list[tuple[str, EngineStats]]) -> Iterable[Metric]:
        for name, field, text in GAUGES:
            family = GaugeMetricFamily(name, text, labels=LABELS)
            for engine, stats in snapshots:
                family.add_metric([self._model_name, engine], getattr(stats, field))
            yield family
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", labels=LABELS
        )
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", labels=[*LABELS, "reason"]
        )
        resident = GaugeMetricFamily(
            "loraplex_adapter_residency", "Adapters by tier.", labels=[*LABELS, "tier"]
        )
        for engine, stats in snapshots:
            labels = [self._model_name, engine]
            usage.add_metric(labels, stats.referenced_blocks / max(stats.total_blocks, 1))
            deferred = stats.waiting_for_adapter + stats.waiting_for_grammar
            reasons.add_metric([*labels, "capacity"], max(stats.waiting - deferred, 0))
            reasons.add_metric([*labels, "deferred"], deferred)
            resident.add_metric([*labels, "device"], len(stats.resident_adapters))
            resident.add_metric([*labels, "host"], len(stats.host_adapters))
        yield from (usage, reasons, resident)

    def _process_families(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("loraplex_engine_up", "1 while the engine answers.", labels=LABELS)
        age = GaugeMetricFamily(
            "loraplex_engine_heartbeat_age_seconds", "Since the engine was heard.", labels=LABELS
        )
        restarts = CounterMetricFamily(
            "loraplex_engine_restarts", "Starts after a crash or hang.", labels=LABELS
        )
        deaths = CounterMetricFamily(
            "loraplex_engine_deaths",
            "Engine processes that were lost and replaced by another.",
            labels=LABELS,
        )
        slowness = GaugeMetricFamily(
            "loraplex_engine_slowness", "Times as long as its fellows an engine takes.", labels=LABELS
        )
        share = GaugeMetricFamily(
            "loraplex_engine_share", "Part of its usual requests that it gets, 0 to 1.", labels=LABELS
        )
        for index, engine in self._engines.observed().items():
            labels = [self._model_name, str(index)]
            slowness.add_metric(labels, self._engines.slow_engines.slowness(index))
            share.add_metric(labels, self._engines.slow_engines.share(index))
            deaths.add_metric(labels, engine.deaths)
            up.add_metric(labels, engine.connected)
            age.add_metric(labels, engine.silent_for())
            restarts.add_metric(labels, engine.restarts)
        yield from (up, age, restarts, deaths, slowness, share)

    def _engines_wanted(self, snapshots: list[tuple[str, EngineStats]]) -> Metric:
        family = GaugeMetricFamily(
            "loraplex_engines_wanted",
            "Engines that the requests need, for an autoscaler.",
            labels=["model_name"],
        )
        family.add_metric(
            [self._model_name], self._engines.demand.engines_wanted([each for _, each in snapshots])
        )
        return family

    def _poison_refusals(self) -> Metric:
        family = CounterMetricFamily(
            "loraplex_poison_refusals",
            "Requests refused because engines died while they ran what they use.",
            labels=["model_name", "kind"],
        )
        for kind in KINDS:
            family.add_metric([self._model_name, kind], self._engines.poison_memory.refusals[kind])
        return family

    def _step_tokens(self, snapshots: list[tuple[str, EngineStats]]) -> Metric:
        """Values since the engine's start: a restart is a reset, which `rate()` handles."""
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens computed in one step.", labels=LABELS
        )
        for engine, stats in snapshots:
            counts = accumulate(stats.step_tokens_histogram or [0] * (len(STEP_TOKEN_BOUNDS) + 1))
            bounds = [*(str(float(bound)) for bound in STEP_TOKEN_BOUNDS), "+Inf"]
            buckets = list(zip(bounds, counts, strict=True))
            family.add_metric([self._model_name, engine], buckets, stats.step_tokens)
        return family

    def _cache_config(self) -> Metric:
        names = ["block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"]
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=[*LABELS, *names])
        for index, engine in self._engines.observed().items():
            values = _cache_values(engine)
            if values is not None:
                family.add_metric([self._model_name, str(index), *values], 1)
        return family

    def _adapters(self, snapshots: list[tuple[str, EngineStats]]) -> Iterable[Metric]:
        running = GaugeMetricFamily(
            "loraplex_adapters_running", "Adapters of the running batch.", labels=LABELS
        )
        waiting = GaugeMetricFamily(
            "loraplex_adapters_waiting", "Adapters of waiting requests.", labels=LABELS
        )
        for engine, stats in snapshots:
            running.add_metric([self._model_name, engine], len(stats.running_adapters))
            waiting.add_metric([self._model_name, engine], len(stats.waiting_adapters))
        yield from (running, waiting)

    def _lora_info(self, snapshots: list[tuple[str, EngineStats]], known: AdapterNames) -> Metric:
        """One sample per engine, whose labels list adapters by their model names. The value is the time of the update.

        Any rows of a batch may have adapters of their own, so `max_lora` is the number of rows.
        """
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters running and waiting.", labels=[*LABELS, *labels]
        )
        for engine, stats in snapshots:
            most = max(stats.max_running, len(stats.resident_adapters))
            running, waiting = (
                ",".join(dict.fromkeys(name for digest in digests for name in known.of(digest)))
                for digests in (stats.running_adapters, stats.waiting_adapters)
            )
            family.add_metric([self._model_name, engine, str(most), running, waiting], time.time())
        return family

    def _total(self, engine: str, field: str, stats: EngineStats) -> float:
        """The counter over all restarts of the engine: a decrease means that it was restarted."""
        key = (engine, field)
        value = float(getattr(stats, field))
        seen = self._seen.get(key, 0.0)
        if value < seen:
            self._base[key] = self._base.get(key, 0.0) + seen
        self._seen[key] = value
        return self._base.get(key, 0.0) + value


def _cache_values(engine: ObservedEngine) -> list[str] | None:
    try:
        info = engine.info()
    except EngineUnavailable:
        return None
    return [str(info.block_size), str(info.num_blocks), info.dtype, str(info.prefix_caching)]
