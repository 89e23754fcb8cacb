"""The reason of each phase names the actual cause, in numbers and names of limits."""

from typing import Any

import pytest

from loraplex.platform.web.usage.phase_reasons import WAITS, reason_of

CASES: tuple[tuple[str, dict[str, Any] | None, str | None], ...] = (
    ("queue", None, WAITS["queue"]),
    ("prefill", None, None),
    ("decode", {}, None),
    ("queue", {}, "it came while a step ran"),
    ("queue", {"before": 1, "limit": "rows"}, "1 request stood before it; every row of the batch was taken"),
    (
        "queue",
        {"before": 1200, "overtaken_by": 3, "limit": "kv_blocks"},
        (
            "1,200 requests stood before it; 3 later requests of tenants with less service went first; "
            "too few KV blocks were free"
        ),
    ),
    ("queue", {"limit": "tokens"}, "other prompts took the tokens of each step"),
    (
        "adapter_load",
        {"tier": "disk", "bytes": 58_400_000, "loads_before": 2},
        "the adapter was on disk, 55.7 MiB; 2 other loads ran before it",
    ),
    ("adapter_load", {"tier": "host"}, "the adapter was in host memory"),
    (
        "adapter_load",
        {"tier": "device", "bytes": 1},
        "the adapter was on the device, and the batch had no place for one more adapter",
    ),
    ("grammar_compile", {"compile_ms": 312}, "compiling its own took 312 ms"),
    (
        "grammar_compile",
        {"before": 2},
        "2 other grammars came before it; its own came from the cache, or took less than 1 ms",
    ),
    (
        "admission",
        {"limit": "tokens_per_minute", "level": "key", "left_percent": 95},
        "nearest limit: tokens per minute of the key, 95\N{NO-BREAK SPACE}% left",
    ),
    (
        "admission",
        {"renewals": 1, "degraded": 1},
        ("the limits had changed and were read again; no limit applies; counted by this gateway's share"),
    ),
    ("prefill", {"computed": 1000, "cached": 384}, "1,000 tokens computed, 384 cached"),
)


@pytest.mark.parametrize(("phase", "causes", "reason"), CASES)
def test_the_reason(phase: str, causes: dict[str, Any] | None, reason: str | None) -> None:
    assert reason_of(phase, causes) == reason
