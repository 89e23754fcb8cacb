"""Decode attention over block tables (PagedAttention, Kwon et al. 2023) with an online softmax (Milakov & Gimelshein 2018).

One work item is one row and one KV head with all query heads of its group, so that K and V are read once.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from loraplex.engine.kernels.compiled.machine import (
    KINDS,
    ParallelBody,
    exp,
    load,
    load_float,
    load_int,
    store,
    store_float,
    thread_number,
    width,
)

_MAX_GROUP, _MAX_HEAD, _MAX_BLOCK = 64, 256, 256
# Per thread, in floats: accumulators, the group's queries, one block's scores, and running (maximum, sum) per head.
_SCRATCH = 2 * _MAX_GROUP * _MAX_HEAD + _MAX_BLOCK + 2 * _MAX_GROUP


@cache
def _body(kind: int) -> ParallelBody:
    def attend(block: Any) -> None:
        arguments = carray(block, (16,))
        threads, rows, heads, kv_heads, size = (
            arguments[0],
            arguments[1],
            arguments[2],
            arguments[3],
            arguments[4],
        )
        qkv, out, cache_address, tables, lengths = (
            arguments[5],
            arguments[6],
            arguments[7],
            arguments[8],
            arguments[9],
        )
        table_columns, block_size, window = arguments[10], arguments[11], arguments[12]
        scale = np.float32(arguments[13]) * np.float32(1e-9)
        q_columns, scratch_floats = arguments[14], np.int64(_SCRATCH)
        thread = np.int64(thread_number())
        scratch = arguments[15] + thread * scratch_floats * 4
        group = heads // kv_heads
        queries = scratch + group * size * 4
        scores = queries + group * size * 4
        state = scores + block_size * 4
        token_bytes = 2 * kv_heads * size * width(kind)

        total = np.int64(0)
        for row in range(rows):
            total += np.int64(load_int(lengths, row)) * kv_heads
        # A thread takes the items whose first token falls into its share of all tokens.
        begin, end = total * thread // threads, total * (thread + 1) // threads
        passed = np.int64(0)
        for row in range(rows):
            length = np.int64(load_int(lengths, row))
            first = max(np.int64(0), length - window) if window > 0 else np.int64(0)
            for kv_head in range(kv_heads):
                mine = begin <= passed < end
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
                        for t in range(low, high):
                            key = base + t * token_bytes
                            dot = np.float32(0)
                            for i in range(size):
                                dot += load_float(queries + g * size * 4, i) * load(kind, key, i)
                            store_float(scores, t, dot)
                            best = max(best, dot)
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
                        for t in range(low, high):
                            value = base + t * token_bytes + kv_heads * size * width(kind)
                            weight = load_float(scores, t)
                            for i in range(size):
                                store_float(target, i, load_float(target, i) + weight * load(kind, value, i))
                for g in range(group):
                    inverse = np.float32(1) / load_float(state, 2 * g + 1)
                    target = out + (row * heads + kv_head * group + g) * size * width(kind)
                    for i in range(size):
                        store(kind, target, i, load_float(scratch + g * size * 4, i) * inverse)

    return ParallelBody(attend, 16)


@cache
def _scratch(threads: int) -> torch.Tensor:
    return torch.empty(threads * _SCRATCH)


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
    threads = torch.get_num_threads()
    _body(KINDS[qkv.dtype])(
        threads,
        lengths.shape[0],
        out.shape[1] // size,
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
        _scratch(threads).data_ptr(),
    )
