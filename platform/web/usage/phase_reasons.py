"""What each phase of a request was about, in words, from the causes that the gateway and the engine noted for it.

Invariant: a reason has numbers and names of limits, never content of a request. Phases that were stored without causes have
the general reason of their name.
"""

from collections.abc import Mapping
from typing import Any, Final

WAITS: Final = {
    "grammar_compile": "the grammar was not compiled yet",
    "adapter_load": "the adapter was not in the engine's memory",
    "queue": "other requests filled the batch or the KV cache",
}
"""Phases in which a request waits, with their general reasons. The others are work."""
_LIMITS: Final = {
    "rows": "every row of the batch was taken",
    "tokens": "other prompts took the tokens of each step",
    "kv_blocks": "too few KV blocks were free",
}
_TIERS: Final = {"disk": "the adapter was on disk", "host": "the adapter was in host memory"}


def reason_of(phase: str, causes: Mapping[str, Any] | None) -> str | None:
    """Say what a phase waited for or did; None where nothing is known and nothing waited."""
    if causes is None:
        return WAITS.get(phase)
    write = {
        "admission": _admission,
        "grammar_compile": _grammar,
        "adapter_load": _adapter,
        "queue": _queue,
        "prefill": _prefill,
    }.get(phase)
    return None if write is None else write(causes)


def _admission(causes: Mapping[str, Any]) -> str:
    parts = []
    if causes.get("renewals"):
        parts.append("the limits had changed and were read again")
    if "limit" in causes:
        name = str(causes["limit"]).replace("_", " ")
        parts.append(
            f"nearest limit: {name} of the {causes['level']}, {causes['left_percent']}\N{NO-BREAK SPACE}% left"
        )
    else:
        parts.append("no limit applies")
    if causes.get("degraded"):
        parts.append("counted by this gateway's share")
    return "; ".join(parts)


def _queue(causes: Mapping[str, Any]) -> str:
    parts = []
    if before := causes.get("before"):
        parts.append(f"{_number(before, 'request')} stood before it")
    if overtaken := causes.get("overtaken_by"):
        parts.append(f"{_number(overtaken, 'later request')} of tenants with less service went first")
    if limit := _LIMITS.get(causes.get("limit", "")):
        parts.append(limit)
    return "; ".join(parts) or "it came while a step ran"


def _adapter(causes: Mapping[str, Any]) -> str:
    tier = causes.get("tier")
    if tier == "device":
        return "the adapter was on the device, and the batch had no place for one more adapter"
    size = causes.get("bytes")
    parts = [_TIERS.get(str(tier), WAITS["adapter_load"]) + (f", {size / 2**20:,.1f} MiB" if size else "")]
    if loads := causes.get("loads_before"):
        parts.append(f"{_number(loads, 'other load')} ran before it")
    return "; ".join(parts)


def _grammar(causes: Mapping[str, Any]) -> str:
    took = causes.get("compile_ms", 0)
    own = (
        f"compiling its own took {took:,} ms"
        if took
        else "its own came from the cache, or took less than 1 ms"
    )
    before = causes.get("before")
    return f"{_number(before, 'other grammar')} came before it; {own}" if before else own


def _prefill(causes: Mapping[str, Any]) -> str:
    return f"{_number(causes.get('computed', 0), 'token')} computed, {causes.get('cached', 0):,} cached"


def _number(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + ("" if count == 1 else "s")
