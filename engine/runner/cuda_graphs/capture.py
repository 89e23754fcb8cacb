"""Captures the steps of an engine on CUDA when it starts, and logs their memory."""

import structlog
import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.lora.device_batch import FEW_ADAPTERS
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.runner.cuda_graphs.adapter_kinds import AdapterKinds
from loraplex.engine.runner.cuda_graphs.buckets import Buckets
from loraplex.engine.runner.cuda_graphs.replay import CudaReplayer
from loraplex.engine.runner.cuda_graphs.static_groups import StaticGroups
from loraplex.engine.runner.cuda_graphs.static_inputs import StaticBlocks, StaticInputs
from loraplex.engine.runner.cuda_graphs.step_graphs import FinalStates, StepGraphs
from loraplex.engine.sampling.step_logits import StepLogits


def capture_steps(
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
