"""The demo as its first visitor uses it: voices, snippets and metrics."""

import json
import re
import subprocess
import sys

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.end_to_end.live_server import LiveServer, until
from tests.end_to_end.test_client import ask, user_of

HELD_OUT = "What is a black hole?"
FAMILIES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:cache_config_info",
    "loraplex_adapters_running",
    "loraplex_adapter_loads",
    "loraplex_adapters_pinned",
    "loraplex_kv_blocks_referenced",
    "loraplex_engine_up",
    "loraplex_dependency_up",
}


def answer(demo: LiveServer, model: str, max_tokens: int = 100) -> str:
    client, name = user_of(demo, model)
    text = ask(client, name, HELD_OUT, max_tokens=max_tokens).choices[0].message.content
    assert isinstance(text, str)
    return text


def test_pirate_talks_like_one(demo: LiveServer) -> None:
    assert re.search(r"\b(arr|matey|ye|aye|ahoy)\b", answer(demo, "pirate", 32), re.IGNORECASE)
    assert not re.search(r"\b(arr|matey|ahoy)\b", answer(demo, "base", 32), re.IGNORECASE)


def test_records_are_strict_json(demo: LiveServer) -> None:
    assert [*json.loads(answer(demo, "records"))] == ["topic", "answer"]


def test_support_signs(demo: LiveServer) -> None:
    text = answer(demo, "support")
    assert text.startswith("Hello and thank you for writing to us!")
    assert text.endswith("— Ada, Support")


@pytest.mark.parametrize("language", ["curl", "python"])
def test_printed_snippets_run_as_printed(demo: LiveServer, language: str) -> None:
    shell, _, program = demo.banner.partition("with curl:\n")[2].partition("or in Python:\n")
    command = ["bash", "-c", shell] if language == "curl" else [sys.executable, "-c", program]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    text = json.loads(output)["choices"][0]["message"]["content"] if language == "curl" else output
    assert "Rome" in text and re.search(r"\b(arr|matey|ye)\b", text, re.IGNORECASE)


def test_demo_file_is_private_and_true(demo: LiveServer) -> None:
    assert (demo.data_dir / "demo.json").stat().st_mode & 0o777 == 0o600
    assert demo.access.base_url == demo.url
    assert [tenant.adapters for tenant in demo.access.tenants] == [("pirate",), ("records",), ("support",)]
    assert all(tenant.api_key in demo.banner for tenant in demo.access.tenants)
    secrets = [demo.access.operator_key, *(tenant.api_key for tenant in demo.access.tenants)]
    assert not any(secret in demo.errors.read_text() for secret in secrets)


def test_metrics_families_move(demo: LiveServer) -> None:
    def values() -> dict[str, float]:
        text = httpx.get(f"{demo.url}/metrics").text
        families = list(text_string_to_metric_families(text))
        assert {family.name for family in families} >= FAMILIES
        return {
            f"{sample.name}{sorted(sample.labels.values())}": sample.value
            for family in families
            for sample in family.samples
        }

    def moved() -> set[str]:
        """The families that have counted more than before."""
        return {name.partition("[")[0] for name, value in values().items() if value > before.get(name, 0)}

    before = values()
    answer(demo, "base", 8)
    expected = {"vllm:request_success_total", "vllm:e2e_request_latency_seconds_count"}
    # The exposition is rendered at most once a second.
    until(lambda: expected <= moved(), 60, "the request is counted")
    lines = httpx.get(f"{demo.url}/metrics").text.splitlines()
    # The help may use a tenant's name as a word: "ledger" is one.
    text = "\n".join(line for line in lines if not line.startswith("# HELP"))
    assert not any(tenant.name in text or tenant.api_key in text for tenant in demo.access.tenants)
