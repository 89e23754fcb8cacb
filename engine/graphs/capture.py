"""The decode graphs of an engine on CUDA, captured when it starts; what they hold is logged."""

import logging

import torch
from torch import Tensor

from loraplex.engine.graphs.buckets import Buckets
from loraplex.engine.graphs.decode_graphs import DecodeGraphs, Grouping, KindLimits
from loraplex.engine.graphs.replay import CudaReplayer
from loraplex.engine.graphs.static_inputs import StaticInputs, StaticShape
from loraplex.engine.models.decoder import Decoder

_logger = logging.getLogger(__name__)


def capture_decodes(
    decoder: Decoder, kv_cache: list[Tensor], shape: StaticShape, grouping: Grouping, limits: KindLimits
) -> DecodeGraphs:
    """Capture every bucket of `shape`, for every kind of adapters that `limits` tells apart."""
    device = decoder.device
    buckets = Buckets(shape.rows)
    graphs = DecodeGraphs(
        lambda batch: decoder.forward(batch, kv_cache),
        StaticInputs(shape, device),
        torch.empty(buckets.most, decoder.config.vocab_size, dtype=decoder.dtype, device=device),
        buckets,
        CudaReplayer(device),
        grouping,
        limits,
    )
    report = graphs.capture()
    _logger.info(
        "captured %d decode graphs in %.1f s, %d MiB", report.graphs, report.seconds, report.nbytes >> 20
    )
    return graphs
