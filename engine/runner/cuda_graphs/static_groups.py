"""`StaticGroups`: groups the rows of a captured step by adapter on the device, from the slots at the time of the replay."""

import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.kernels.group_rows import group_on_device
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import (
    DECODE_ROWS,
    FEW_ADAPTERS,
    PREFILL_ROWS,
    ChunkBuffers,
    chunk_bound,
    make_chunk_buffers,
)
from loraplex.engine.runner.cuda_graphs.adapter_kinds import AdapterKind


class StaticGroups:
    """Keeps its buffers for its own lifetime: a replay reads and writes them."""

    def __init__(self, path: AdapterPath, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._buffers: dict[tuple[int, AdapterKind, bool], ChunkBuffers] = {}

    def __call__(
        self, row_slots: Tensor, kind: AdapterKind, num_decodes: Tensor | None = None
    ) -> LoraBatch | None:
        """Group `row_slots` int32 [rows] as steps of this kind require. `num_decodes` None: every row is a decode."""
        rows, is_decode = row_slots.shape[0], num_decodes is None
        adapters = min(rows, FEW_ADAPTERS) if kind is AdapterKind.FEW else rows
        chunk_rows = DECODE_ROWS if is_decode or self._path.deterministic else PREFILL_ROWS
        buffers = self._buffers.get((rows, kind, is_decode))
        if buffers is None:
            buffers = make_chunk_buffers(rows, chunk_bound(rows, adapters, chunk_rows), self._device)
            self._buffers[rows, kind, is_decode] = buffers
        return group_on_device(
            row_slots,
            adapters,
            is_decode=is_decode,
            is_static=True,
            buffers=buffers,
            workspace=self._path.workspace,
            deterministic=self._path.deterministic,
        )
