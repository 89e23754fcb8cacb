"""RMSNorm, with the residual addition folded in."""

import torch

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for
from loraplex.engine.kernels.reference import rms_norm as reference
from loraplex.engine.kernels.sgmv import joined
from loraplex.engine.lora.device_batch import PendingDelta


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    delta: PendingDelta | None = None,
) -> torch.Tensor:
    """See `reference.rms_norm`. With `delta` it computes the norm of x + delta and leaves x unchanged."""
    if delta is not None:
        from loraplex.engine.kernels.triton import rms_norm as folded

        return folded.expand_rms_norm(x, residual, weight, epsilon, joined(delta))
    backend = backend_for(x)
    if backend is KernelBackend.TRITON:
        from loraplex.engine.kernels.triton import rms_norm as triton

        return triton.rms_norm(x, residual, weight, epsilon)
    if backend is KernelBackend.COMPILED:
        from loraplex.engine.kernels.cpu import rms_norm as compiled

        return compiled.rms_norm(x, residual, weight, epsilon)
    return reference.rms_norm(x, residual, weight, epsilon)
