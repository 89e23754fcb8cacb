"""The activation of the gated MLP."""

import torch

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for
from loraplex.engine.kernels.reference import silu_mul as reference
from loraplex.engine.kernels.sgmv import joined
from loraplex.engine.lora.device_batch import PendingDelta


def silu_mul(gate_up: torch.Tensor, delta: PendingDelta | None = None) -> torch.Tensor:
    """See `reference.silu_mul`. With `delta` it uses gate_up + delta and leaves gate_up unchanged."""
    if delta is not None:
        from loraplex.engine.kernels.triton import silu_mul as folded

        return folded.expand_silu_mul(gate_up, joined(delta))
    backend = backend_for(gate_up)
    if backend is KernelBackend.TRITON:
        from loraplex.engine.kernels.triton import silu_mul as triton

        return triton.silu_mul(gate_up)
    if backend is KernelBackend.COMPILED:
        from loraplex.engine.kernels.cpu import silu_mul as compiled

        return compiled.silu_mul(gate_up)
    return reference.silu_mul(gate_up)
