"""Groups the rows of a step by adapter slot where their kernels run: on the device or on the host."""

from collections.abc import Sequence

import torch

from loraplex.engine.kernels.dispatch import KernelBackend, backend_on
from loraplex.engine.lora import batch as host
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import (
    DeviceLoraBatch,
    LoraPath,
    LoraWorkspace,
    make_chunk_buffers,
)


def group_rows(
    row_slots: Sequence[int],
    device: torch.device,
    num_decodes: int | None = None,
    *,
    of_step: Sequence[int] | None = None,
    workspace: LoraWorkspace | None = None,
    deterministic: bool = False,
) -> LoraBatch | None:
    """Group rows by slot; -1 is the base model. Rows from `num_decodes` on belong to prefill chunks.

    None when no row has an adapter. Nothing waits for the device. `of_step`: the slots of all rows of the step, if these
    are some of them. They decide the kernels, as they do in a captured step.
    """
    if backend_on(device) is not KernelBackend.TRITON:
        return host.group_rows(row_slots, device, num_decodes)
    adapters = len(set(row_slots) - {-1})
    if not adapters:
        return None
    slots = torch.tensor(row_slots, dtype=torch.int32)
    if device.type == "cuda":
        slots = slots.pin_memory().to(device, non_blocking=True)
    path = LoraPath.of(
        adapters if of_step is None else len(set(of_step) - {-1}),
        is_mixed=num_decodes is not None and num_decodes < len(row_slots),
        deterministic=deterministic,
    )
    return group_on_device(slots, path, adapters, workspace=workspace)


def group_on_device(
    row_slots: torch.Tensor,
    path: LoraPath,
    adapters: int,
    *,
    is_static: bool = False,
    workspace: LoraWorkspace | None = None,
) -> DeviceLoraBatch:
    """Group `row_slots` int32 [rows], which are on the device and hold at most `adapters` slots besides -1.

    The launches may be captured: a replay groups the contents that `row_slots` has then, with the same kernels and grids.
    """
    chunks = None
    if path is not LoraPath.BY_ROW:
        from loraplex.engine.kernels.triton import group_rows

        chunks = make_chunk_buffers(row_slots.shape[0], adapters, path, row_slots.device)
        group_rows.group_rows(row_slots, path.chunk_rows, chunks)
    return DeviceLoraBatch(row_slots, path, chunks, is_static, workspace)


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
    return tuple(group_on_device(row_slots, path, 1) for path in _paths(deterministic))


def _paths(deterministic: bool) -> tuple[LoraPath, ...]:
    if deterministic:
        return (LoraPath.DETERMINISTIC,)
    return LoraPath.FOLDED, LoraPath.BY_ROW, LoraPath.MIXED
