"""Captures the decode graphs of an engine on CUDA when it starts, and logs their memory."""

import structlog
import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.lora.device_batch import FEW_ADAPTERS
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.runner.cuda_graphs.buckets import Buckets
from loraplex.engine.runner.cuda_graphs.decode_graphs import AdapterKinds, DecodeGraphs
from loraplex.engine.runner.cuda_graphs.replay import CudaReplayer
from loraplex.engine.runner.cuda_graphs.static_groups import StaticGroups
from loraplex.engine.runner.cuda_graphs.static_inputs import StaticInputs, StaticShape


def capture_decodes(
    decoder: Decoder,
    kv_cache: list[Tensor],
    shape: StaticShape,
    adapters: AdapterPath | None,
    max_adapters: int,
) -> DecodeGraphs:
    """Capture every bucket of `shape` for every kind of adapters; without adapters only, if `adapters` is None.

    `max_adapters`: the most distinct adapters of a step.
    """
    path = adapters or AdapterPath()
    few = FEW_ADAPTERS if adapters is not None else 0
    device = decoder.device
    buckets = Buckets(shape.rows)
    graphs = DecodeGraphs(
        lambda batch: decoder.forward(batch, kv_cache),
        StaticInputs(shape, device),
        torch.empty(buckets.most, decoder.config.vocab_size, dtype=decoder.dtype, device=device),
        buckets,
        CudaReplayer(device),
        StaticGroups(path, max_adapters),
        AdapterKinds(few, is_one=path.deterministic),
    )
    report = graphs.capture()
    structlog.get_logger("loraplex.engine").info(
        "decode graphs captured",
        graphs=report.graphs,
        bytes=report.nbytes,
        seconds=round(report.seconds, 1),
    )
    return graphs
