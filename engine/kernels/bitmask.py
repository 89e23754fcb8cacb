"""Forbids tokens by a bitmask: a token whose bit is 0 gets the logit -inf."""

import torch

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for
from loraplex.engine.kernels.reference import bitmask as reference


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """See `reference.apply_bitmask`."""
    backend = backend_for(logits)
    if backend is KernelBackend.TRITON:
        from loraplex.engine.kernels.triton import logit_masks

        logit_masks.apply_bitmask(logits, rows, bitmask)
    elif backend is KernelBackend.COMPILED:
        from loraplex.engine.kernels.cpu import bitmask as compiled

        compiled.apply_bitmask(logits, rows, bitmask)
    else:
        reference.apply_bitmask(logits, rows, bitmask)
