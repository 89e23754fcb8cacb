"""`StaticGroups`: groups the rows of a captured step by adapter on the device, from the slots at the time of the replay."""

import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.kernels.group_rows import group_on_device
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import (
    DECODE_ROWS,
    FEW_ADAPTERS,
    ChunkBuffers,
    chunk_bound,
    make_chunk_buffers,
)
from loraplex.engine.runner.cuda_graphs.decode_graphs import AdapterKind


class StaticGroups:
    """Keeps its buffers for its own lifetime: a replay reads and writes them."""

    def __init__(self, path: AdapterPath, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._buffers: dict[tuple[int, AdapterKind], ChunkBuffers] = {}

    def __call__(self, row_slots: Tensor, kind: AdapterKind) -> LoraBatch | None:
        """Group `row_slots` int32 [rows] as steps of this kind require."""
        rows = row_slots.shape[0]
        adapters = min(rows, FEW_ADAPTERS) if kind is AdapterKind.FEW else rows
        buffers = self._buffers.get((rows, kind))
        if buffers is None:
            buffers = make_chunk_buffers(rows, chunk_bound(rows, adapters, DECODE_ROWS), self._device)
            self._buffers[rows, kind] = buffers
        return group_on_device(
            row_slots,
            adapters,
            is_decode=True,
            is_static=True,
            buffers=buffers,
            workspace=self._path.workspace,
            deterministic=self._path.deterministic,
        )
