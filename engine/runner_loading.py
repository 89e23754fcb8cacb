"""The runner of a loaded model: KV cache, sampler and adapter path, with kernels compiled and steps captured."""

import torch

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.config import EngineConfig
from loraplex.engine.kv_cache.tensors import allocate_kv_cache
from loraplex.engine.lora.device_batch import make_workspace
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.model_loading import LoadedModel
from loraplex.engine.runner.cuda_graphs.buckets import Buckets
from loraplex.engine.runner.cuda_graphs.capture import capture_steps
from loraplex.engine.runner.cuda_graphs.static_inputs import StaticBlocks
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.runner.warm_up import StepLimits, WarmUp
from loraplex.engine.sampling.sampler import Sampler
from loraplex.engine.structured_output.bitmask_filling import BitmaskFiller


def load_runner(
    model: LoadedModel, config: EngineConfig, pool: AdapterPool, masks: BitmaskFiller
) -> ModelRunner:
    """Return a runner whose kernels are compiled. Padding rows of replayed steps use a block that the pool never hands out."""
    block_size, device = config.cache.block_size, model.device
    is_replaying = replays(config.cuda_graphs, device)
    num_blocks = model.num_blocks + is_replaying
    kv_cache = allocate_kv_cache(model.config, num_blocks, block_size, model.kv_dtype, device)
    sampler = Sampler(model.config.vocab_size, model.config.eos_token_ids, transfers=HostTransfers(device))
    path = _adapter_path(model, config, pool)
    runner = ModelRunner(model.decoder, kv_cache, block_size, sampler, pool, masks, path)
    slots = model.decoder.max_adapter_slots if pool.max_bytes else 0
    limits = StepLimits(config.scheduler.max_num_seqs, max_tokens(model, config), model.max_model_len, slots)
    WarmUp(model.decoder, kv_cache, block_size, sampler, path, limits).run()
    if is_replaying:
        buckets = Buckets(config.scheduler.max_num_seqs, max_tokens(model, config))
        blocks = StaticBlocks(-(-model.max_model_len // block_size), block_size, model.num_blocks)
        adapters = path if pool.max_bytes else None
        most = config.scheduler.max_adapters_per_step
        runner.replay(capture_steps(model.decoder, kv_cache, buckets, blocks, adapters, most))
    return runner


def max_tokens(model: LoadedModel, config: EngineConfig) -> int:
    """Return how many tokens a step computes at most."""
    return config.scheduler.max_tokens(is_cuda=model.device.type == "cuda")


def replays(setting: str, device: torch.device) -> bool:
    """Whether steps are replayed as CUDA graphs."""
    if setting not in ("auto", "off"):
        raise ValueError(f"`cuda_graphs` must be auto or off, got {setting!r}")
    return setting == "auto" and device.type == "cuda"


def _adapter_path(model: LoadedModel, config: EngineConfig, pool: AdapterPool) -> AdapterPath:
    """Return the adapter path. Requires the pool, because the kernels' workspace depends on the greatest rank."""
    if model.device.type == "cpu" or not pool.max_bytes:
        return AdapterPath(config.deterministic)
    rows = max_tokens(model, config)
    workspace = make_workspace(model.decoder.sites, rows, model.device)
    return AdapterPath(config.deterministic, workspace, rows)
