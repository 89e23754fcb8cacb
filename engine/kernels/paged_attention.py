"""Attention over the paged KV cache: all decodes of a step at once, and all its prefill chunks."""

from collections.abc import Hashable

import torch

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for, backend_on
from loraplex.engine.kernels.prefill_chunks import PrefillChunks
from loraplex.engine.kernels.reference import paged_attention as reference

__all__ = ["decode_attention", "decode_tiling", "prefill_attention"]


def decode_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """See `reference.decode_attention`."""
    backend = backend_for(qkv)
    if backend is KernelBackend.TRITON:
        from loraplex.engine.kernels.triton import decode_attention as triton

        triton.decode_attention(qkv, out, kv_cache, block_tables, lengths, scale, window, kv_scales)
    elif backend is KernelBackend.COMPILED and kv_cache.dtype is qkv.dtype:
        from loraplex.engine.kernels.cpu import paged_attention as compiled

        compiled.decode_attention(qkv, out, kv_cache, block_tables, lengths, scale, window)
    else:
        reference.decode_attention(qkv, out, kv_cache, block_tables, lengths, scale, window, kv_scales)


def prefill_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    chunks: PrefillChunks,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """See `reference.prefill_attention`, which serves a CPU: there most of the time is torch's attention."""
    if backend_for(qkv) is KernelBackend.TRITON:
        from loraplex.engine.kernels.triton import prefill_attention as triton

        triton.prefill_attention(qkv, out, kv_cache, chunks, scale, window, kv_scales)
    else:
        reference.prefill_attention(qkv, out, kv_cache, chunks, scale, window, kv_scales)


def decode_tiling(rows: int, device: torch.device) -> Hashable:
    """Return what the kernel of `decode_attention` is compiled for; equal values mean the same machine code."""
    if backend_on(device) is not KernelBackend.TRITON:
        return None
    from loraplex.engine.kernels.triton import decode_attention as triton

    return triton.compiled_rows(rows)
