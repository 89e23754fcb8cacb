"""The response's `usage`, the metrics and the settlement state the same tokens."""

import asyncio
import json
from typing import Any

import pytest

from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.tenants.quotas.reservation import SettledUsage

BODY: Any = {"model": "demo/base", "prompt": [[3, 4, 5], [6, 7]], "n": 2, "max_tokens": 4}


def tokens_of(counted: RequestStats | SettledUsage) -> tuple[int, int, int]:
    return counted.prompt_tokens, counted.cached_tokens, counted.completion_tokens


def usage_in(text: str, stream: bool) -> tuple[int, int, int]:
    whole = text.split("data: ")[-2] if stream else text
    usage = json.loads(whole)["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached, usage["completion_tokens"]


async def ended(gateway: Any) -> tuple[RequestStats, SettledUsage]:
    """What metrics and settlement got of the only request."""
    async with asyncio.timeout(60):
        while not gateway.admissions.settled:
            await asyncio.sleep(0.005)
    [stats], [(_, usage)] = gateway.recorder.timings, gateway.admissions.settled
    return stats, usage


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_metrics_and_settlement_are_equal(start_gateway: Any, stream: bool) -> None:
    gateway = await start_gateway(FakeScript(cached_tokens=2))
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await gateway.post("/v1/completions", BODY | options)
    stats, usage = await ended(gateway)
    assert usage_in(response.text, stream) == tokens_of(stats) == tokens_of(usage) == (5, 4, 16)
    assert (stats.finish_reason, usage.outcome) == ("length", "completed")
    chunks = response.text.split("data: ")[1:-1] if stream else [response.text]
    fingerprint = gateway.engine.info().system_fingerprint
    assert (
        {json.loads(each)["system_fingerprint"] for each in chunks}
        == {usage.system_fingerprint}
        == {fingerprint}
    )
    assert [tokens_of(used_so_far()) for used_so_far in gateway.admissions.followed] == [(5, 4, 16)]


async def test_a_client_that_leaves_is_in_metrics_and_settlement_alike(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(token_interval_s=0.001))
    leaving = asyncio.create_task(gateway.post("/v1/completions", BODY | {"max_tokens": 2000}))
    async with asyncio.timeout(60):
        while (await gateway.engine.stats()).generation_tokens < 20:
            await asyncio.sleep(0.005)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    stats, usage = await ended(gateway)
    made = (await gateway.engine.stats()).generation_tokens
    assert tokens_of(stats) == tokens_of(usage) == (5, 0, made)
    assert (stats.finish_reason, usage.outcome) == ("abort", "aborted")


async def test_a_failure_is_in_metrics_and_settlement_alike(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="nan", after_tokens=3),)))
    response = await gateway.post("/v1/completions", BODY | {"prompt": [3, 4, 5], "n": 1})
    stats, usage = await ended(gateway)
    assert response.status_code == 500 and tokens_of(stats) == tokens_of(usage) == (3, 0, 3)
    assert (stats.finish_reason, usage.outcome) == ("error", "failed")
