"""Metric names and buckets are vLLM's; counters survive a restarted engine; old label sets vanish."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.platform.engines.managed_engine import Managed

from loraplex.engine.fake_engine import FakeScript
from loraplex.engine.messages import STEP_TOKEN_BOUNDS, EngineStats, Finished, Started, Usage
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.adapter_names import MAX_ADAPTERS, AdapterNames
from loraplex.platform.observability.metrics import Metrics, one_two_five
from loraplex.platform.observability.request_stats import RequestStats

DOCUMENT = Path(__file__).parents[3] / "deploy" / "guide" / "monitoring.md"
OPTIONAL = {
    "vllm:engine_sleep_state",
    "vllm:kv_block_lifetime_seconds",
    "vllm:kv_block_idle_before_evict_seconds",
    "vllm:kv_block_reuse_gap_seconds",
}
EXPECTED = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prompt_tokens_cached",
    "vllm:prompt_tokens_by_source",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:request_success",
    "vllm:corrupted_requests",
    "vllm:admission_rejections",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:iteration_tokens_total",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_params_n",
    "loraplex_engine_restarts",
    "loraplex_engine_heartbeat_age_seconds",
    "loraplex_adapter_residency",
    "loraplex_adapter_loads",
    "loraplex_step_bytes",
    "loraplex_memory_rate_bytes",
    "loraplex_grammar_trials",
    "loraplex_grammar_trial_seconds",
    "loraplex_grammar_compilations",
    "loraplex_grammar_compile_seconds",
    "loraplex_grammar_failures",
    "loraplex_grammar_mask_seconds",
    "loraplex_grammar_late_masks",
    "loraplex_grammar_forced_tokens",
    "loraplex_requests_waiting_for_grammar",
    "loraplex_asyncio_tasks",
    "loraplex_dependency_up",
    "loraplex_build_info",
    "loraplex_aborted_requests",
    "loraplex_engine_up",
    "loraplex_engine_slow_steps",
    "loraplex_engine_deaths",
    "loraplex_poison_refusals",
    "loraplex_adapters_running",
    "loraplex_adapters_waiting",
    "loraplex_http_connections",
    "loraplex_http_connections_refused",
    "loraplex_price_age_seconds",
    "http_requests",
    "loraplex_adapter_load_seconds",
    "loraplex_grammar_wait_seconds",
    "loraplex_tenant_requests",
    "loraplex_tenant_refused_requests",
    "loraplex_tenant_failed_requests",
    "loraplex_tenant_tokens",
    "loraplex_adapter_requests",
    "loraplex_adapter_tokens",
    "process_resident_memory_bytes",
    "process_cpu_seconds",
    "process_open_fds",
]


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.render().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    wanted = {"model_name": "m", "engine": "0", **labels}
    return samples(metrics)[(name, tuple(sorted(wanted.items())))]


@pytest.fixture
def engine() -> Managed:
    return Managed(FakeScript())


@pytest.fixture
def metrics(engine: Managed) -> Metrics:
    return Metrics("m", "1.2.3", 4096, EnginePool([engine]))


def test_every_promised_family_is_exported(metrics: Metrics) -> None:
    metrics.set_dependency("postgresql", True)
    names = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    assert set(EXPECTED) <= names


def test_every_other_family_of_vllm_is_documented_as_not_exported(metrics: Metrics) -> None:
    families = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    exported = {name for name in families if name.startswith("vllm:") and not name.endswith("_created")}
    _, _, section = DOCUMENT.read_text().partition("### What of vLLM's metrics is not exported")
    absent = set(
        re.findall(r"`(vllm:\w+)`", "".join(line for line in section.splitlines() if line[:2] == "| "))
    )
    assert exported == {name for name in EXPECTED if name.startswith("vllm:")}
    assert absent >= OPTIONAL and not absent & exported


def test_a_request_is_counted_once(metrics: Metrics) -> None:
    stats = RequestStats(
        arrival=10.0,
        n=1,
        max_tokens=16,
        prompt_lengths=[30],
        first_token=10.05,
        last_token=10.25,
        finished=10.3,
        token_gaps=[0.1, 0.1],
    )
    stats.see(0, Started("r", None, 16, queue_s=0.01, prefill_s=0.03))
    stats.see(0, Finished("r", 0, "stop", Usage(30, 16, 3)))
    metrics.record(stats)
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.04") == 0
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.06") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 2
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert value(metrics, "vllm:request_prefill_kv_computed_tokens_sum") == 14
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(0.3)
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == pytest.approx(0.01)
    assert value(metrics, "vllm:request_prefill_time_seconds_sum") == pytest.approx(0.03)
    assert value(metrics, "vllm:request_inference_time_seconds_sum") == pytest.approx(0.23)
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 3


def test_a_request_without_tokens_and_an_unknown_reason(metrics: Metrics) -> None:
    stats = RequestStats(arrival=0.0, n=2, max_tokens=4, prompt_lengths=[1], finished=1.0)
    stats.finish_reason = "tool_calls"
    metrics.record(stats)
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0
    assert value(metrics, "vllm:request_queue_time_seconds_count") == 0


def test_counters_never_fall_when_an_engine_restarts(metrics: Metrics, engine: Managed) -> None:
    seen = []
    for tokens in (5, 9, 2, None, 1, 3):
        engine.last_stats = None if tokens is None else EngineStats(generation_tokens=tokens)
        seen.append(value(metrics, "vllm:generation_tokens_total"))
    assert seen == [5, 9, 11, 11, 12, 14]


def test_gauges_and_adapters_follow_the_snapshot(metrics: Metrics, engine: Managed) -> None:
    engine.last_stats = EngineStats(
        running=2,
        waiting=5,
        waiting_for_adapter=2,
        referenced_blocks=3,
        total_blocks=12,
        running_adapters=["a" * 64, "b" * 64],
        waiting_adapters=["c" * 64],
        resident_adapters=["a" * 64],
        host_adapters=[(b"n", "a" * 64), (b"n", "d" * 64)],
    )
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="capacity") == 3
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="deferred") == 2
    assert value(metrics, "loraplex_adapters_running") == 2
    assert value(metrics, "loraplex_adapters_waiting") == 1
    assert value(metrics, "loraplex_adapter_residency", tier="device") == 1
    assert value(metrics, "loraplex_adapter_residency", tier="host") == 2
    assert all(digest * 64 not in metrics.render().decode() for digest in "abc")


def test_adapters_are_named_as_requests_name_them_where_configured(engine: Managed) -> None:
    metrics = Metrics("m", "1.2.3", 4096, EnginePool([engine]), adapter_names=True)

    def infos() -> list[tuple[str, str, str]]:
        found = [dict(labels) for name, labels in samples(metrics) if name == "vllm:lora_requests_info"]
        return [(i["max_lora"], i["running_lora_adapters"], i["waiting_lora_adapters"]) for i in found]

    for digest, name in (("a", "support"), ("b", "billing@2"), ("a", "support:next"), ("c", "billing@2")):
        metrics.record_adapter(digest, name)
    engine.last_stats = EngineStats(
        resident_adapters=["a", "b"], running_adapters=["a", "b", "c"], waiting_adapters=["c", "d"]
    )
    assert infos() == [("2", "support:next,support,billing@2", "billing@2,d")], "of `d` no request is known"
    engine.last_stats = EngineStats(max_running=64, resident_adapters=["c"], running_adapters=["c"])
    assert infos() == [("64", "billing@2", "")], "earlier label sets are gone"


def test_names_of_adapters_are_bounded() -> None:
    names = AdapterNames()
    for number in range(MAX_ADAPTERS + 1):
        names.record(str(number), "first")
    assert names.of("0") == ("0",) and names.of("1") == ("first",)
    for number in range(9):
        names.record("1", f"name@{number}")
    assert names.of("1") == ("name@8", "name@7", "name@6", "name@5")


def test_steps_are_counted_by_their_tokens(metrics: Metrics, engine: Managed) -> None:
    assert value(metrics, "vllm:iteration_tokens_total_count") == 0
    counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
    counts[0], counts[3], counts[-1] = 4, 2, 1
    engine.last_stats = EngineStats(step_tokens=20_000, step_tokens_histogram=counts)
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="16.0") == 4
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="32.0") == 6
    assert value(metrics, "vllm:iteration_tokens_total_count") == 7
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 20_000


def test_buckets_reach_the_model_length() -> None:
    assert one_two_five(120) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(1) == (1,)


def test_trials_are_counted_by_result(metrics: Metrics) -> None:
    for result in ("accepted", "accepted", "too_costly"):
        metrics.record_compile_check(result, 0.25)
    exported = samples(metrics)
    counted = {
        dict(labels)["result"]: n for (name, labels), n in exported.items() if name.endswith("_trials_total")
    }
    assert counted == {"accepted": 2, "too_costly": 1, "invalid": 0, "unavailable": 0, "abandoned": 0}
    assert exported["loraplex_grammar_trial_seconds_sum", ()] == 0.75


def test_who_waits_for_a_grammar_is_deferred() -> None:
    engine = Managed(FakeScript())
    engine.last_stats = EngineStats(waiting=5, waiting_for_adapter=1, waiting_for_grammar=2)
    metrics = Metrics("m", "1.2.3", 4096, EnginePool([engine]))
    by_reason = "vllm:num_requests_waiting_by_reason"
    assert value(metrics, by_reason, reason="deferred") == 3
    assert value(metrics, by_reason, reason="capacity") == 2


def test_the_cache_is_described_with_the_labels_of_vllm(metrics: Metrics) -> None:
    (labels,) = [dict(labels) for name, labels in samples(metrics) if name == "vllm:cache_config_info"]
    info = FakeScript().info
    assert labels == {
        "model_name": "m",
        "engine": "0",
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "cache_dtype": info.dtype,
        "enable_prefix_caching": "True",
    }


def test_waits_for_adapters_and_grammars_count_where_there_were_any(metrics: Metrics) -> None:
    for grammar_s, adapter_s in ((0.0, 0.0), (0.25, 0.5)):
        stats = RequestStats(arrival=0.0, n=1, max_tokens=4, prompt_lengths=[1], finished=1.0)
        stats.see(0, Started("r", None, 0, queue_s=1.0, grammar_s=grammar_s, adapter_s=adapter_s))
        metrics.record(stats)
    exported = samples(metrics)
    for name, seconds in (("adapter_load", 0.5), ("grammar_wait", 0.25)):
        assert exported[f"loraplex_{name}_seconds_count", ()] == 1
        assert exported[f"loraplex_{name}_seconds_sum", ()] == seconds
