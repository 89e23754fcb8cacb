"""The engine's part of the settings."""

from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.platform.config import Settings


def engine_config(settings: Settings, model: str, engines: int = 1) -> EngineConfig:
    """Return the configuration of each of `engines` of the model at `model`, which share this host's memory."""
    return EngineConfig(
        model=model,
        dtype=settings.dtype,
        device=settings.device,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
        memory_utilization=settings.memory_utilization,
        cuda_graphs=settings.cuda_graphs,
        deterministic=settings.deterministic,
        scheduler=SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_adapters_per_step=settings.max_adapters_per_step,
            max_waiting=settings.max_waiting,
        ),
        cache=CacheConfig(
            kv_bytes=settings.kv_cache_bytes,
            kv_dtype=settings.kv_cache_dtype,
            prefix_caching=settings.prefix_caching,
        ),
        lora=LoraConfig(
            max_bytes=settings.adapter_bytes,
            host_max_bytes=settings.adapter_host_bytes // engines,
            page_dtype=settings.adapter_page_dtype,
        ),
    )
