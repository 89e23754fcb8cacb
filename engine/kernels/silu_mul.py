"""The gated MLP's activation."""

import torch

from loraplex.engine.kernels.bodies import Body, body_for
from loraplex.engine.kernels.reference import silu_mul as reference


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_mul`."""
    body = body_for(gate_up)
    if body is Body.TRITON:
        from loraplex.engine.kernels import triton_silu_mul as triton

        return triton.silu_mul(gate_up)
    if body is Body.COMPILED:
        from loraplex.engine.kernels.compiled import silu_mul as compiled

        return compiled.silu_mul(gate_up)
    return reference.silu_mul(gate_up)
