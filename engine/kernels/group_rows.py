"""Groups the rows of a step by adapter slot where their kernels run: on the device or on the host."""

from collections.abc import Sequence

import torch

from loraplex.engine.kernels.dispatch import KernelBackend, backend_on
from loraplex.engine.lora import batch as host
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import (
    DECODE_ROWS,
    FEW_ADAPTERS,
    PREFILL_ROWS,
    ChunkBuffers,
    DeviceLoraBatch,
    LoraWorkspace,
    chunk_bound,
    make_chunk_buffers,
)


def group_rows(
    row_slots: Sequence[int],
    device: torch.device,
    num_decodes: int | None = None,
    *,
    workspace: LoraWorkspace | None = None,
    deterministic: bool = False,
) -> LoraBatch | None:
    """Group rows by slot; -1 is the base model. Rows from `num_decodes` on belong to prefill chunks.

    None when no row has an adapter. Nothing waits for the device.
    """
    if backend_on(device) is not KernelBackend.TRITON:
        return host.group_rows(row_slots, device, num_decodes)
    adapters = len(set(row_slots) - {-1})
    if not adapters:
        return None
    slots = torch.tensor(row_slots, dtype=torch.int32)
    if device.type == "cuda":
        slots = slots.pin_memory().to(device, non_blocking=True)
    return group_on_device(
        slots,
        adapters,
        is_decode=num_decodes is None or num_decodes == len(row_slots),
        workspace=workspace,
        deterministic=deterministic,
    )


def group_on_device(
    row_slots: torch.Tensor,
    adapters: int,
    *,
    is_decode: bool,
    is_static: bool = False,
    buffers: ChunkBuffers | None = None,
    workspace: LoraWorkspace | None = None,
    deterministic: bool = False,
) -> DeviceLoraBatch:
    """Group `row_slots` int32 [rows], which are on the device and hold at most `adapters` slots besides -1.

    The launches may be captured: a replay groups the contents that `row_slots` has then, with the same kernels and grids.
    `deterministic`: one path for every step, whatever the batch.
    """
    from loraplex.engine.kernels.triton import group_rows

    num_rows = row_slots.shape[0]
    chunk_rows = DECODE_ROWS if is_decode or deterministic else PREFILL_ROWS
    num_chunks = chunk_bound(num_rows, adapters, chunk_rows)
    chunks = buffers or make_chunk_buffers(num_rows, num_chunks, row_slots.device)
    group_rows.group_rows(row_slots, num_chunks, chunk_rows, chunks)
    are_few = adapters <= FEW_ADAPTERS
    return DeviceLoraBatch(
        row_slots=row_slots,
        chunks=chunks,
        num_chunks=num_chunks,
        chunk_rows=chunk_rows,
        by_row=is_decode and not are_few and not deterministic,
        is_folded=is_decode and are_few and not deterministic,
        is_static=is_static,
        workspace=workspace,
    )


def every_path_of(
    slot: int, rows: int, device: torch.device, *, deterministic: bool = False
) -> tuple[LoraBatch, ...]:
    """Return `rows` rows with the adapter in `slot` for each set of kernels that may compute them: decodes first, prompts
    last.
    """
    if backend_on(device) is not KernelBackend.TRITON:
        batches = (host.group_rows([slot] * rows, device, num_decodes) for num_decodes in (rows, 0))
        return tuple(batch for batch in batches if batch is not None)
    row_slots = torch.full((rows,), slot, dtype=torch.int32, device=device)
    if deterministic:
        return (group_on_device(row_slots, 1, is_decode=True, deterministic=True),)
    return tuple(
        group_on_device(row_slots, adapters, is_decode=is_decode)
        for adapters, is_decode in ((1, True), (FEW_ADAPTERS + 1, True), (1, False))
    )


def every_path(device: torch.device, *, deterministic: bool = False) -> tuple[DeviceLoraBatch, ...]:
    """Return one row with an adapter for each set of kernels that may compute a step's adapters, prompts last.

    All sites act on it. Empty on a device without such kernels.
    """
    if backend_on(device) is not KernelBackend.TRITON:
        return ()
    row_slots = torch.zeros(1, dtype=torch.int32, device=device)
    if deterministic:
        return (group_on_device(row_slots, 1, is_decode=True, is_static=True, deterministic=True),)
    kinds = ((1, True), (FEW_ADAPTERS + 1, True), (1, False))
    return tuple(
        group_on_device(row_slots, adapters, is_decode=is_decode, is_static=True)
        for adapters, is_decode in kinds
    )
