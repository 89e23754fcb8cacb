"""Joins the statistics of several engines into one: numbers are added, adapters united, rates and ages the largest."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

from loraplex.engine.messages import EngineStats, TenantSteps

LARGEST: Final = frozenset(
    {"adapter_read_rate", "adapter_copy_rate", "adapter_page_error", "heartbeat_age_s", "memory_rate"}
)


def merged_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Merge at least one. `draining` is that of all: while one takes requests, the engines together do."""
    merged: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        merged[name] = _merged(name, [getattr(each, name) for each in stats])
    return EngineStats(**merged)


def _merged(name: str, values: list[Any]) -> Any:
    if name == "draining":
        return all(values)
    if name == "tenant_steps":
        return _tenant_steps([steps for value in values for steps in value])
    if name == "step_tokens_histogram":
        return [sum(counts) for counts in zip_longest(*values, fillvalue=0)]
    if isinstance(values[0], list):
        return list(dict.fromkeys(entry for value in values for entry in value))
    return max(values) if name in LARGEST else sum(values)


def _tenant_steps(all_steps: list[TenantSteps]) -> list[TenantSteps]:
    """The largest tenants first."""
    sums: dict[bytes, TenantSteps] = {}
    for steps in all_steps:
        known = sums.get(steps.namespace, TenantSteps(steps.namespace, 0, 0, 0))
        sums[steps.namespace] = TenantSteps(
            steps.namespace,
            known.prefill_tokens + steps.prefill_tokens,
            known.decode_tokens + steps.decode_tokens,
            known.waiting + steps.waiting,
        )
    return sorted(sums.values(), key=lambda each: -each.tokens)
