"""RMSNorm, with the residual addition folded in."""

import torch

from loraplex.engine.kernels.bodies import Body, body_for
from loraplex.engine.kernels.reference import rms_norm as reference


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """See `reference.rms_norm`."""
    body = body_for(x)
    if body is Body.TRITON:
        from loraplex.engine.kernels import triton_rms_norm as triton

        return triton.rms_norm(x, residual, weight, epsilon)
    if body is Body.COMPILED:
        from loraplex.engine.kernels.compiled import rms_norm as compiled

        return compiled.rms_norm(x, residual, weight, epsilon)
    return reference.rms_norm(x, residual, weight, epsilon)
