"""Decode attention over block tables (PagedAttention, Kwon et al. 2023) with an online softmax (Milakov & Gimelshein 2018).

One work item is one row and one KV head with all query heads of its group, so that K and V are read once.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from loraplex.engine.kernels.cpu.numba_bridge import (
    KINDS,
    ParallelKernel,
    exp,
    load,
    load_constant,
    load_float,
    load_int,
    store,
    store_float,
    team_size,
    thread_number,
    width,
)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _scratch_floats(group: int, size: int, block_size: int) -> int:
    """Per thread: accumulators, the group's queries, one block's scores, running (maximum, sum) per head; whole cache lines."""
    return (2 * group * size + block_size + 2 * group + 15) // 16 * 16


@njit(inline="always")  # type: ignore[untyped-decorator]
def _score(kind: int, query: int, key: int, size: int) -> Any:
    dot = np.float32(0)
    for i in range(size):
        dot += load_float(query, i) * load_constant(kind, key, i)
    return dot


@njit(inline="always")  # type: ignore[untyped-decorator]
def _scores_of_4(kind: int, query: int, key: int, stride: int, size: int, out: int) -> None:
    """Score four keys at once, so that their sums hide each other's latency."""
    dot0, dot1, dot2, dot3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(size):
        q = load_float(query, i)
        dot0 += q * load_constant(kind, key, i)
        dot1 += q * load_constant(kind, key + stride, i)
        dot2 += q * load_constant(kind, key + 2 * stride, i)
        dot3 += q * load_constant(kind, key + 3 * stride, i)
    store_float(out, 0, dot0)
    store_float(out, 1, dot1)
    store_float(out, 2, dot2)
    store_float(out, 3, dot3)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _add_4_values(kind: int, target: int, value: int, stride: int, size: int, weights: int) -> None:
    w0, w1, w2, w3 = (
        load_float(weights, 0),
        load_float(weights, 1),
        load_float(weights, 2),
        load_float(weights, 3),
    )
    for i in range(size):
        added = w0 * load_constant(kind, value, i) + w1 * load_constant(kind, value + stride, i)
        added += w2 * load_constant(kind, value + 2 * stride, i) + w3 * load_constant(
            kind, value + 3 * stride, i
        )
        store_float(target, i, load_float(target, i) + added)


@cache
def _kernel(kind: int) -> ParallelKernel:
    def attend(block: Any) -> None:
        arguments = carray(block, (15,))
        threads, rows, heads, kv_heads, size = (
            np.int64(team_size()),
            arguments[0],
            arguments[1],
            arguments[2],
            arguments[3],
        )
        qkv, out, cache_address, tables, lengths = (
            arguments[4],
            arguments[5],
            arguments[6],
            arguments[7],
            arguments[8],
        )
        table_columns, block_size, window = arguments[9], arguments[10], arguments[11]
        scale = np.float32(arguments[12]) * np.float32(1e-9)
        q_columns = arguments[13]
        thread = np.int64(thread_number())
        group = heads // kv_heads
        scratch = arguments[14] + thread * _scratch_floats(group, size, block_size) * 4
        queries = scratch + group * size * 4
        scores = queries + group * size * 4
        state = scores + block_size * 4
        token_bytes = 2 * kv_heads * size * width(kind)

        total = np.int64(0)
        for row in range(rows):
            total += np.int64(load_int(lengths, row)) * kv_heads
        # A thread takes the items whose first token lies in its share of all tokens.
        begin, end = total * thread // threads, total * (thread + 1) // threads
        passed = np.int64(0)
        for row in range(rows):
            length = np.int64(load_int(lengths, row))
            first = max(np.int64(0), length - window) if window > 0 else np.int64(0)
            for kv_head in range(kv_heads):
                # A row without tokens is no decode.
                mine = length > 0 and begin <= passed < end
                passed += length
                if not mine:
                    continue
                query = qkv + (row * q_columns + kv_head * group * size) * width(kind)
                for i in range(group * size):
                    store_float(queries, i, load(kind, query, i) * scale)
                    store_float(scratch, i, np.float32(0))
                for g in range(group):
                    store_float(state, 2 * g, np.float32(-3.0e38))
                    store_float(state, 2 * g + 1, np.float32(0))
                for index in range(first // block_size, (length + block_size - 1) // block_size):
                    physical = np.int64(load_int(tables, row * table_columns + index))
                    base = cache_address + physical * block_size * token_bytes + kv_head * size * width(kind)
                    low = max(first - index * block_size, np.int64(0))
                    high = min(length - index * block_size, block_size)
                    for g in range(group):
                        best = load_float(state, 2 * g)
                        previous = best
                        query = queries + g * size * 4
                        for t in range(low, high - 3, 4):
                            _scores_of_4(
                                kind, query, base + t * token_bytes, token_bytes, size, scores + t * 4
                            )
                        for t in range(low + (high - low) // 4 * 4, high):
                            store_float(scores, t, _score(kind, query, base + t * token_bytes, size))
                        for t in range(low, high):
                            best = max(best, load_float(scores, t))
                        correction = exp(previous - best)
                        accumulated = load_float(state, 2 * g + 1) * correction
                        for t in range(low, high):
                            weight = exp(load_float(scores, t) - best)
                            store_float(scores, t, weight)
                            accumulated += weight
                        store_float(state, 2 * g, best)
                        store_float(state, 2 * g + 1, accumulated)
                        target = scratch + g * size * 4
                        for i in range(size):
                            store_float(target, i, load_float(target, i) * correction)
                        values = base + kv_heads * size * width(kind)
                        for t in range(low, high - 3, 4):
                            _add_4_values(
                                kind, target, values + t * token_bytes, token_bytes, size, scores + t * 4
                            )
                        for t in range(low + (high - low) // 4 * 4, high):
                            value, weight = values + t * token_bytes, load_float(scores, t)
                            for i in range(size):
                                added = weight * load_constant(kind, value, i)
                                store_float(target, i, load_float(target, i) + added)
                for g in range(group):
                    inverse = np.float32(1) / load_float(state, 2 * g + 1)
                    target = out + (row * heads + kv_head * group + g) * size * width(kind)
                    for i in range(size):
                        store(kind, target, i, load_float(scratch + g * size * 4, i) * inverse)

    return ParallelKernel(attend, 15)


@cache
def _scratch(floats: int) -> torch.Tensor:
    return torch.empty(floats)


def decode_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    """See `reference.decode_attention`. `scale` travels as a multiple of 1e-9."""
    block_size, kv_heads, size = kv_cache.shape[1], kv_cache.shape[3], kv_cache.shape[4]
    heads, threads = out.shape[1] // size, torch.get_num_threads()
    scratch = _scratch(threads * _scratch_floats(heads // kv_heads, size, block_size))
    _kernel(KINDS[qkv.dtype])(
        threads,
        lengths.shape[0],
        heads,
        kv_heads,
        size,
        qkv.data_ptr(),
        out.data_ptr(),
        kv_cache.data_ptr(),
        block_tables.data_ptr(),
        lengths.data_ptr(),
        block_tables.shape[1],
        block_size,
        window or 0,
        round(scale * 1e9),
        qkv.shape[1],
        scratch.data_ptr(),
    )
