"""The runner of a loaded model: KV cache, sampler and adapter path, with kernels compiled and steps captured."""

import structlog
import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.config import EngineConfig
from loraplex.engine.kv_cache.tensors import allocate_kv_cache
from loraplex.engine.lora.device_batch import FEW_ADAPTERS, make_workspace
from loraplex.engine.lora.page_geometry import MAX_ADAPTER_SLOTS
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.model_loading import LoadedModel
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.runner.cuda_graphs.adapter_kinds import AdapterKinds, StaticGroups
from loraplex.engine.runner.cuda_graphs.buckets import Buckets
from loraplex.engine.runner.cuda_graphs.replay import CudaReplayer
from loraplex.engine.runner.cuda_graphs.static_inputs import StaticBlocks, StaticInputs
from loraplex.engine.runner.cuda_graphs.step_graphs import FinalStates, StepGraphs
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.runner.warm_up import StepLimits, WarmUp
from loraplex.engine.sampling.sampler import Sampler
from loraplex.engine.sampling.step_logits import StepLogits
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
    slots = MAX_ADAPTER_SLOTS if pool.max_bytes else 0
    limits = StepLimits(config.scheduler.max_num_seqs, max_tokens(model, config), model.max_model_len, slots)
    WarmUp(model.decoder, kv_cache, block_size, sampler, path, limits).run()
    if is_replaying:
        buckets = Buckets(config.scheduler.max_num_seqs, max_tokens(model, config))
        blocks = StaticBlocks(-(-model.max_model_len // block_size), block_size, model.num_blocks)
        adapters = path if pool.max_bytes else None
        most = config.scheduler.max_adapters_per_step
        runner.replay(_capture_steps(model.decoder, kv_cache, buckets, blocks, adapters, most))
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


def _capture_steps(
    decoder: Decoder,
    kv_cache: list[Tensor],
    buckets: Buckets,
    blocks: StaticBlocks,
    adapters: AdapterPath | None,
    max_adapters: int,
) -> StepGraphs:
    """Capture every shape of `buckets` for every kind of adapters; without adapters only, if `adapters` is None.

    `max_adapters`: the most distinct adapters of a step.
    """
    path = adapters or AdapterPath()
    few = FEW_ADAPTERS if adapters is not None else 0
    device = decoder.device
    logits = torch.empty(buckets.rows, decoder.config.vocab_size, dtype=decoder.dtype, device=device)
    states = FinalStates(buckets.most, decoder.config.hidden_size, decoder.dtype, device)
    graphs = StepGraphs(
        # Only chunks are scored.
        lambda batch: decoder.forward(batch, kv_cache, None if batch.chunks is None else states.keep),
        StaticInputs(buckets, blocks, device),
        StepLogits(logits, torch.empty(buckets.rows, dtype=torch.int64, device=device)),
        buckets,
        CudaReplayer(device),
        StaticGroups(path, max_adapters),
        AdapterKinds(few, is_one=path.deterministic),
        states,
    )
    report = graphs.capture()
    structlog.get_logger("loraplex.engine").info(
        "steps captured",
        graphs=report.graphs,
        mixed=report.mixed,
        bytes=report.nbytes,
        seconds=round(report.seconds, 1),
    )
    return graphs
