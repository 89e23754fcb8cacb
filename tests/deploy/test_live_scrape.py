"""A served gateway's `/metrics` after one request: every metric that dashboards and rules name is there, the queries of vLLM's
dashboards find data, and nothing that clients write adds a series.
"""

import json
import random
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import NEWEST_POSTGRES, Servers
from tests.deploy.promql import Scrape, filled, selectors
from tests.deploy.test_rules import DASHBOARDS, queries, rules
from tests.platform.conftest import build_tokenizer
from tests.platform.server.serve_process import make_key, script, serving, until
from tests.platform.web.otlp_receiver import Received, receiving

MODEL = "tiny"
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "LINK", "PURGE")
LATENCIES = ("e2e_request_latency", "time_to_first_token", "inter_token_latency")
OF_MODEL = '{model_name="$model_name"}'
# The queries of the dashboards that vLLM publishes (serving overview, performance, queries, KV cache), in our own words: each
# quantile, mean and rate that they draw, once.
VLLM_QUERIES = (
    *(
        f"histogram_quantile({share}, sum by (le) (rate(vllm:{name}_seconds_bucket{OF_MODEL}[$__rate_interval])))"
        for name in LATENCIES
        for share in ("0.99", "0.95", "0.9", "0.5")
    ),
    *(
        f"rate(vllm:{name}_seconds_sum{OF_MODEL}[$__rate_interval])"
        f" / rate(vllm:{name}_seconds_count{OF_MODEL}[$__rate_interval])"
        for name in (*LATENCIES, "request_time_per_output_token")
    ),
    *(
        f"rate(vllm:request_{name}_time_seconds_sum{OF_MODEL}[$__rate_interval])"
        for name in ("queue", "prefill", "decode", "inference")
    ),
    *(
        f"sum by (le) (increase(vllm:{name}_bucket{OF_MODEL}[$__rate_interval]))"
        for name in ("request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total")
    ),
    *(
        f"histogram_quantile(0.9, sum by (le, model_name) (rate(vllm:{name}_bucket{OF_MODEL}[$__rate_interval])))"
        for name in ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens")
    ),
    f"rate(vllm:request_max_num_generation_tokens_sum{OF_MODEL}[$__rate_interval])",
    f"rate(vllm:request_prefill_kv_computed_tokens_sum{OF_MODEL}[$__rate_interval])",
    f"rate(vllm:request_params_n_count{OF_MODEL}[$__rate_interval])",
    *(
        f"rate(vllm:{name}_total{OF_MODEL}[$__rate_interval])"
        for name in (
            *("prompt_tokens", "generation_tokens", "prompt_tokens_cached", "prompt_tokens_by_source"),
            *("num_preemptions", "corrupted_requests", "admission_rejections"),
        )
    ),
    *(
        f"vllm:{name}{OF_MODEL}"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    ),
    *(
        f'sum(vllm:num_requests_waiting_by_reason{{model_name="$model_name", reason="{reason}"}})'
        for reason in ("capacity", "deferred")
    ),
    *(
        f'sum by (finished_reason) (increase(vllm:request_success_total{{finished_reason="{reason}"}}[$__range]))'
        for reason in ("stop", "length", "abort", "error", "repetition")
    ),
    (
        f"sum(rate(vllm:prefix_cache_hits_total{OF_MODEL}[$__rate_interval]))"
        f" / (sum(rate(vllm:prefix_cache_queries_total{OF_MODEL}[$__rate_interval])) > 0)"
    ),
    'max by (block_size, num_gpu_blocks, cache_dtype, enable_prefix_caching) (vllm:cache_config_info{engine=~".*"})',
    (
        '(sum(rate(http_requests_total{job=~"$job", status="5xx"}[$__rate_interval])) or vector(0))'
        ' / (sum(rate(http_requests_total{job=~"$job"}[$__rate_interval])) > 0)'
    ),
    "rate(process_cpu_seconds_total[$__rate_interval])",
    "process_resident_memory_bytes",
)
# Of these, one request makes some more than zero.
COUNTED_BY_ONE_REQUEST = (
    "vllm:e2e_request_latency_seconds_count",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:request_inference_time_seconds_count",
    "vllm:request_prompt_tokens_sum",
    "vllm:request_generation_tokens_sum",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_params_max_tokens_sum",
    "vllm:request_params_n_sum",
    "vllm:request_prefill_kv_computed_tokens_sum",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "loraplex_admission_used_tokens_total",
    "loraplex_tenant_tokens_total",
    "loraplex_adapter_requests_total",
    "loraplex_journal_writes_total",
)
# What the endpoint picker of the Gateway API inference extension reads, and the labels in it.
MODEL_SERVER_GAUGES = {
    "vllm:num_requests_waiting": set[str](),
    "vllm:num_requests_running": set[str](),
    "vllm:kv_cache_usage_perc": set[str](),
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
}


@dataclass
class Live:
    """A served gateway, a key, its metrics after one request of each plane, the collector of its traces and its log."""

    url: str
    collector: Received
    log: Path
    key: str
    scrape: Scrape

    def ask(self, client: httpx.Client, method: str, path: str, **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}", **fields.pop("headers", {})}
        return client.request(method, f"{self.url}{path}", headers=headers, **fields)


def scraped(url: str) -> Scrape:
    return Scrape(httpx.get(f"{url}/metrics").text)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}


@pytest.fixture(scope="module")
def live(servers_of: Callable[[int], Servers], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    build_tokenizer().save_pretrained(folder / MODEL)
    servers = servers_of(NEWEST_POSTGRES)
    database_url, redis_url = servers.kept.emptied(), servers.services.redis_url
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    settings = {"database_url": database_url, "redis_url": redis_url, "metrics_adapter_names": "true"}
    with receiving() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        settings["otlp_endpoint"] = collector.url
        yield from _served(folder, settings, collector)


def _served(folder: Path, settings: dict[str, str], collector: Received) -> Iterator[Live]:
    database_url = settings["database_url"]
    with serving(folder, folder / MODEL, script(token_interval_s=0.02), settings=settings) as serve:
        key = make_key(database_url, scopes=("tenant:admin",))
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{serve.url}/v1/chat/completions", json=chat(), headers=headers)
        assert answer.status_code == 200, answer.text
        assert httpx.get(f"{serve.url}/tenant/v1/me", headers=headers).status_code == 200
        generated = "vllm:generation_tokens_total"
        until(lambda: any(scraped(serve.url).samples.get(generated, {}).values()))
        yield Live(serve.url, collector, folder / "stderr", key, scraped(serve.url))


def test_every_metric_of_the_dashboards_is_in_the_scrape(live: Live) -> None:
    for path in DASHBOARDS:
        for query in queries(path):
            for selector in selectors(filled(query, MODEL)):
                if not selector.recorded:
                    assert selector.found_in(live.scrape), f"{path.stem}: {query}: {selector}"


def test_every_metric_of_the_rules_is_in_the_scrape(live: Live) -> None:
    for rule in rules():
        for selector in selectors(rule["expr"]):
            if not selector.recorded:
                assert selector.found_in(live.scrape), f"{rule}: {selector}"


def test_the_queries_of_dashboards_for_vllm_find_data(live: Live) -> None:
    """Every selector has samples; that Prometheus computes with them is not asked here."""
    for query in VLLM_QUERIES:
        found = selectors(filled(query, MODEL))
        assert found and all(selector.found_in(live.scrape) for selector in found), query


def test_one_request_is_counted(live: Live) -> None:
    assert not [name for name in COUNTED_BY_ONE_REQUEST if not sum(live.scrape.samples[name].values())]


def test_it_is_a_model_server_of_the_gateway_api_inference_extension(live: Live) -> None:
    """Both APIs, and the gauges of its endpoint picker, at one address."""
    completion = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
    with httpx.Client(timeout=60) as client:
        answers = [live.ask(client, "POST", "/v1/chat/completions", json=chat())]
        answers.append(live.ask(client, "POST", "/v1/completions", json=completion))
        text = client.get(f"{live.url}/metrics").text
    assert [answer.status_code for answer in answers] == [200, 200]
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, labels in MODEL_SERVER_GAUGES.items():
        (sample,) = families[name].samples
        assert families[name].type == "gauge" and labels <= set(sample.labels), name
    (usage,) = families["vllm:kv_cache_usage_perc"].samples
    assert 0 <= usage.value <= 1
    (cache,) = families["vllm:cache_config_info"].samples
    assert int(cache.labels["block_size"]) > 0 and int(cache.labels["num_gpu_blocks"]) > 0
    (adapters,) = families["vllm:lora_requests_info"].samples
    assert int(adapters.labels["max_lora"]) >= 0 and abs(adapters.value - time.time()) < 60


def test_its_traces_arrive_and_its_log_has_access_lines(live: Live) -> None:
    until(lambda: live.collector.spans)
    assert f"chat {MODEL}" in {span.name for span in live.collector.spans}
    assert not [span for span in live.collector.spans if "metrics" in span.name]
    lines = [json.loads(line) for line in live.log.read_text().splitlines() if line.startswith("{")]
    (line,) = [each for each in lines if each.get("handler") == "/v1/chat/completions"][:1]
    assert (line["event"], line["status"], line["completion_tokens"]) == ("request", 200, 4)


def test_a_selector_that_nothing_matches_finds_nothing(live: Live) -> None:
    for query in ("vllm:no_such_metric", 'vllm:num_requests_running{model_name="other"}', 'up{a!~".*"}'):
        assert not any(selector.found_in(live.scrape) for selector in selectors(query))


def test_nothing_that_clients_write_adds_a_series(live: Live, pytestconfig: pytest.Config) -> None:
    """120 requests with random names, headers, paths, methods and parameters; 10,000 with `--long`."""
    count = 10_000 if pytestconfig.getoption("--long") else 120
    generator = random.Random(7)
    with httpx.Client(timeout=60) as client:
        for step in range(60):
            intrude(live, client, generator, step)
        for method in METHODS:
            live.ask(client, method, "/v1/chat/completions")
        before = settled(live.url)
        for step in range(count):
            intrude(live, client, generator, step)
    assert settled(live.url) - before <= overloaded(before)


Series: TypeAlias = set[tuple[str, tuple[tuple[str, str], ...]]]


def settled(url: str) -> Series:
    """The series once a rendering that began after now is shown."""
    time.sleep(1.2)
    return scraped(url).series


def overloaded(series: Series) -> Series:
    """All that a busy machine may add: a first 5xx of a route and method that have been answered before."""
    answered = [dict(labels) for name, labels in series if name == "http_requests_total"]
    return {("http_requests_total", tuple(sorted({**each, "status": "5xx"}.items()))) for each in answered}


def intrude(live: Live, client: httpx.Client, generator: random.Random, step: int) -> None:
    """One request that has random text wherever a client may write some."""

    def word() -> str:
        return "".join(generator.choices(string.ascii_letters + string.digits, k=generator.randint(1, 40)))

    headers = {
        "x-request-id": word(),
        "user-agent": word(),
        "x-forwarded-for": word(),
        "traceparent": word(),
        f"x-{word()}": word(),
    }
    if step % 10 == 9:
        headers["authorization"] = f"Bearer {word()}"
    match step % 6:
        case 0:
            live.ask(client, "POST", "/v1/chat/completions", json=chat(model=word()), headers=headers)
        case 1:
            fields = {
                "user": word(),
                "metadata": {word()[:30]: word()},
                "prompt_cache_key": word(),
                "max_tokens": 1,
            }
            live.ask(client, "POST", "/v1/chat/completions", json=chat(**fields), headers=headers)
        case 2:
            live.ask(client, "POST", "/v1/completions", json={word(): word()}, headers=headers)
        case 3:
            live.ask(client, "GET", f"/v1/models/{word()}", headers=headers)
        case 4:
            path = f"/{word()}" if step % 4 else f"/tenant/v1/adapters/{word()}?{word()}={word()}"
            live.ask(client, "GET", path, headers=headers)
        case _:
            live.ask(client, generator.choice(METHODS), "/v1/chat/completions", headers=headers)
