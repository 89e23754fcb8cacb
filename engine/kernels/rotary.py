"""Rotary embedding and the KV write: everything between the qkv projection and attention."""

import torch

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for
from loraplex.engine.kernels.reference import rotary as reference
from loraplex.engine.kernels.sgmv import joined
from loraplex.engine.lora.device_batch import PendingDelta


def rotary_write_kv(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    delta: PendingDelta | None = None,
) -> None:
    """See `reference.rotary_write_kv`. With `delta` it uses qkv + delta, and writes V to the cache only."""
    if delta is not None:
        from loraplex.engine.kernels.triton import expand_rotary as folded

        folded.expand_rotary_write_kv(
            qkv, kv_cache, positions, slots, rope, norms, epsilon, kv_scales, joined(delta)
        )
        return
    backend = backend_for(qkv)
    if backend is KernelBackend.TRITON:
        from loraplex.engine.kernels.triton import rotary as triton

        triton.rotary_write_kv(qkv, kv_cache, positions, slots, rope, norms, epsilon, kv_scales)
    elif backend is KernelBackend.COMPILED and kv_cache.dtype is qkv.dtype:
        from loraplex.engine.kernels.cpu import rotary as compiled

        compiled.rotary_write_kv(qkv, kv_cache, positions, slots, rope, norms, epsilon)
    else:
        reference.rotary_write_kv(qkv, kv_cache, positions, slots, rope, norms, epsilon, kv_scales)
