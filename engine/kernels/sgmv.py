"""Grouped LoRA: y += (x A^T) B for the rows of each adapter. Rows without one are never read or written."""

import torch

from loraplex.engine.kernels.bodies import Body, body_for
from loraplex.engine.kernels.reference import sgmv as reference
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.site import LoraSite


def sgmv(x: torch.Tensor, y: torch.Tensor, site: LoraSite, batch: LoraBatch) -> None:
    """Add every adapter's delta to `y` in place. x [rows, inputs], y [rows, outputs], both contiguous."""
    body = body_for(x)
    if body is Body.TRITON:
        from loraplex.engine.kernels import triton_sgmv

        triton_sgmv.sgmv(x, y, site, batch.groups)
    elif body is Body.COMPILED and site.page_dtype is None:
        from loraplex.engine.kernels.compiled import sgmv as compiled

        if batch.decodes is not None:
            compiled.sgmv(x, y, site, batch.decodes)
        if batch.chunks is not None:
            reference.sgmv(x, y, site, batch.chunks)
    else:
        reference.sgmv(x, y, site, batch.groups)
