"""Advice where a memory plan does not fit, or serves less than its settings ask for: the setting to change and its value."""

from dataclasses import dataclass

from loraplex.engine.capacity.memory_plan import (
    ADAPTER_SHARE,
    MIN_ADAPTER_BYTES,
    MemoryPlan,
    default_adapter_bytes,
)
from loraplex.engine.capacity.weight_bytes import weight_bytes
from loraplex.engine.config import EngineConfig
from loraplex.engine.models.config import ModelConfig

SMALLER_SCHEMES = ("int8", "int4")
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@dataclass(frozen=True, slots=True)
class Advice:
    """One change. `needed`: the engine does not start without it."""

    text: str
    needed: bool


def memory_advice(model: ModelConfig, config: EngineConfig, plan: MemoryPlan) -> list[Advice]:
    """Return the advice for a plan; empty if it fits and has room for what the settings allow at once."""
    if not plan.fits:
        return [Advice(text, needed=True) for text in _lower(model, config, plan)]
    found = []
    most = config.scheduler.max_num_seqs
    if plan.rows < most:
        found.append(
            f"{plan.rows} of `max_num_seqs` {most} rows fit with {plan.context} tokens each; more are preempted: lower it, or "
            f"give the KV cache {format_bytes(most * plan.context * plan.kv_token_bytes)}"
        )
    distinct = config.scheduler.max_adapters_per_step
    own = plan.adapters[0]
    if plan.adapter_budget and own.resident < distinct:
        found.append(
            f"`adapter_bytes` holds {own.resident} adapters of rank {plan.rank}, fewer than `max_adapters_per_step` {distinct}: "
            f"{format_bytes(distinct * own.num_bytes)} would hold them"
        )
    return [Advice(text, needed=False) for text in found]


def _lower(model: ModelConfig, config: EngineConfig, plan: MemoryPlan) -> list[str]:
    """Changes that each suffice alone, unless a requested pool is too small in a memory that is too small."""
    block = plan.kv_token_bytes * config.cache.block_size
    need, own = -(-plan.context * plan.kv_token_bytes // block) * block, plan.adapter_budget
    sized = config.cache.kv_bytes is not None
    if plan.budget is None or (sized and plan.rows < 1):
        shorter = [f"a context of at most {plan.kv_tokens} tokens"] if plan.kv_tokens else []
        return [f"`kv_cache_bytes` of at least {format_bytes(need)}", *shorter]
    fixed = plan.weights_bytes + plan.reserve_bytes
    room = plan.budget - fixed
    kv_bytes = plan.kv_bytes if sized else need
    tokens = (room - own) // block * config.cache.block_size
    found = []
    if own and room >= kv_bytes:
        found.append(f"`adapter_bytes` of at most {format_bytes(_round(room - kv_bytes))}")
    if sized and _round(room - own) >= max(need, block):
        found.append(f"`kv_cache_bytes` of at most {format_bytes(_round(room - own))}")
    if not sized and 0 < tokens < plan.context:
        found.append(f"a context or `max_model_len` of at most {tokens} tokens")
    found += _smaller_weights(model, config, plan, kv_bytes)
    if config.lora.max_bytes is None:
        # On a larger device the default is larger too, unless the KV cache was given a size.
        own = max(MIN_ADAPTER_BYTES, 0 if sized else -(-kv_bytes // (ADAPTER_SHARE - 1)))
    return found or [
        f"a device of at least {format_bytes(int((fixed + own + kv_bytes) / config.memory_utilization))}"
    ]


def _smaller_weights(model: ModelConfig, config: EngineConfig, plan: MemoryPlan, kv_bytes: int) -> list[str]:
    if plan.budget is None or config.quantization != "none" or model.compression is not None:
        return []
    found = []
    for scheme in SMALLER_SCHEMES:
        weights = sum(weight.num_bytes for weight in weight_bytes(model, plan.machine.dtype, scheme))
        room = plan.budget - weights - plan.reserve_bytes
        adapters = config.lora.max_bytes
        if adapters is None:
            adapters = default_adapter_bytes(room, 0 if config.cache.kv_bytes is None else kv_bytes)
        if adapters + kv_bytes <= room:
            found.append(f"`quantization` {scheme}: the weights take {format_bytes(weights)}")
    return found


def format_bytes(num_bytes: int) -> str:
    """Format a size in decimal units, as devices are sold: 1 GB is 10**9 bytes."""
    unit, name = next((each for each in _UNITS if num_bytes >= each[0]), _UNITS[-1])
    return f"{num_bytes / unit:.2f} {name}"


def _round(num_bytes: int) -> int:
    """Round down to two decimals, so that the printed size fits."""
    return next(
        (num_bytes // unit * unit for unit in (10**7, 10**4) if num_bytes >= 100 * unit), num_bytes // 10 * 10
    )
