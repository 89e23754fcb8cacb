"""Per-head norm of q and k, rotary embedding (Su et al. 2021) and the KV write, one pass per token."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from loraplex.engine.kernels.cpu.numba_bridge import (
    KINDS,
    ParallelKernel,
    load,
    load_float,
    load_long,
    store,
    team_size,
    thread_number,
    threads_for,
    width,
)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _normalize(kind: int, head: int, size: int, weight: int, epsilon: Any) -> None:
    total = np.float32(0)
    for i in range(size):
        value = load(kind, head, i)
        total += value * value
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + epsilon)
    for i in range(size):
        store(kind, head, i, load(kind, head, i) * scale * load(kind, weight, i))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _rotate(kind: int, head: int, half: int, cos: int, sin: int) -> None:
    for i in range(half):
        first, second = load(kind, head, i), load(kind, head, half + i)
        c, s = load_float(cos, i), load_float(sin, i)
        store(kind, head, i, first * c - second * s)
        store(kind, head, half + i, second * c + first * s)


@cache
def _kernel(kind: int) -> ParallelKernel:
    def rotate_and_write(block: Any) -> None:
        arguments = carray(block, (14,))
        threads, tokens, heads, kv_heads, size = (
            np.int64(team_size()),
            arguments[0],
            arguments[1],
            arguments[2],
            arguments[3],
        )
        qkv, cache_address, positions, slots = arguments[4], arguments[5], arguments[6], arguments[7]
        cos, sin, half = arguments[8], arguments[9], arguments[10]
        q_norm, k_norm = arguments[11], arguments[12]
        epsilon = np.float32(arguments[13]) * np.float32(1e-12)
        row_bytes = (heads + 2 * kv_heads) * size * width(kind)
        for token in range(np.int64(thread_number()), tokens, threads):
            row = qkv + token * row_bytes
            position = load_long(positions, token)
            for head in range(heads + kv_heads):
                address = row + head * size * width(kind)
                if q_norm != 0:
                    _normalize(kind, address, size, q_norm if head < heads else k_norm, epsilon)
                if half != 0:
                    _rotate(kind, address, half, cos + position * half * 4, sin + position * half * 4)
            source = row + heads * size * width(kind)
            target = cache_address + load_long(slots, token) * 2 * kv_heads * size * width(kind)
            for i in range(2 * kv_heads * size):
                store(kind, target, i, load(kind, source, i))

    return ParallelKernel(rotate_and_write, 14)


def rotary_write_kv(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
) -> None:
    """See `reference.rotary_write_kv`."""
    kv_heads, size = kv_cache.shape[3], kv_cache.shape[4]
    tokens, columns = qkv.shape
    cos, sin = (0, 0) if rope is None else (rope[0].data_ptr(), rope[1].data_ptr())
    q_norm, k_norm = (0, 0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
    _kernel(KINDS[qkv.dtype])(
        threads_for(qkv.numel()),
        tokens,
        columns // size - 2 * kv_heads,
        kv_heads,
        size,
        qkv.data_ptr(),
        kv_cache.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        cos,
        sin,
        0 if rope is None else rope[0].shape[1],
        q_norm,
        k_norm,
        round(epsilon * 1e12),
    )
