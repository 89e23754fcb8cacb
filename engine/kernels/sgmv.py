"""Grouped LoRA: y += (x A^T) B for the rows of each adapter. Rows without one are never read or written."""

import torch

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for
from loraplex.engine.kernels.reference import sgmv as reference
from loraplex.engine.lora.batch import HostLoraBatch, LoraBatch
from loraplex.engine.lora.device_batch import Branch, DeviceLoraBatch, InLine, PendingDelta, hidden_for
from loraplex.engine.lora.site import LoraSite


def sgmv(x: torch.Tensor, y: torch.Tensor, site: LoraSite, batch: LoraBatch) -> None:
    """Add every adapter's delta to `y` in place. x [rows, inputs], y [rows, outputs], both contiguous."""
    if isinstance(batch, DeviceLoraBatch):
        expand(shrink(x, site, batch), y, site, batch)
    elif isinstance(batch, HostLoraBatch):
        _sgmv_on_host(x, y, site, batch)


def shrink(x: torch.Tensor, site: LoraSite, batch: DeviceLoraBatch) -> torch.Tensor:
    """Compute the hidden values of every adapted row, for `expand`. Later work on the current stream runs in parallel."""
    from loraplex.engine.kernels.triton import lora_shrink

    hidden = hidden_for(site, batch)
    with _branch(batch).fork():
        lora_shrink.shrink(x, site, batch, hidden)
    return hidden


def expand(hidden: torch.Tensor, y: torch.Tensor, site: LoraSite, batch: DeviceLoraBatch) -> None:
    """Wait for `shrink`, and add its rows' deltas to `y` in place."""
    from loraplex.engine.kernels.triton import lora_expand

    _branch(batch).join()
    lora_expand.expand(hidden, y, site, batch)


def joined(delta: PendingDelta) -> PendingDelta:
    """Make the current stream wait for `delta`, and return it."""
    _branch(delta.batch).join()
    return delta


def _branch(batch: DeviceLoraBatch) -> Branch:
    return InLine() if batch.workspace is None else batch.workspace.branch


def _sgmv_on_host(x: torch.Tensor, y: torch.Tensor, site: LoraSite, batch: HostLoraBatch) -> None:
    if backend_for(x) is not KernelBackend.COMPILED or site.page_dtype is not None:
        reference.sgmv(x, y, site, batch.groups)
        return
    from loraplex.engine.kernels.cpu import sgmv as compiled

    if batch.decodes is not None:
        compiled.sgmv(x, y, site, batch.decodes)
    if batch.chunks is not None:
        reference.sgmv(x, y, site, batch.chunks)
