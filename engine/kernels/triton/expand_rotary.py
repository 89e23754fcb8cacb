"""SGMV's second half folded into the rotary embedding and the KV write in Triton: one program per chunk and head.

For steps of few adapters, where launches cost more than bytes. Invariant: every row is in a chunk, base rows too, and the
thread that writes a pair (i, i + half) also reads it, so that q and k change in place without a race.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.launch_plans import launch_kernel
from loraplex.engine.kernels.triton.lora_expand import TILE_STAGES, tile_delta
from loraplex.engine.kernels.triton.lora_pages import (
    chunk_at,
    entry_at,
    hidden_ranks,
    is_aligned,
    page_type,
    rank_at,
    rows_of_chunk,
)
from loraplex.engine.kernels.triton.rms_norm import inverse_rms
from loraplex.engine.kernels.triton.rotary import norm_weights, rotated, square_sums, store_part
from loraplex.engine.lora.device_batch import PendingDelta
from loraplex.engine.lora.page_geometry import PAGE_RANKS, SPLIT_K

NUM_WARPS = 4
MIN_COLUMNS = 16


@triton.jit  # type: ignore[untyped-decorator]
def adapted(  # type: ignore[no-untyped-def]
    place,
    column,
    within,
    hidden,
    entry,
    rank,
    width,
    is_member,
    pages,
    split_stride,
    splits: tl.constexpr,
    page_type: tl.constexpr,
    assembly: tl.constexpr,
    aligned: tl.constexpr,
    block_m: tl.constexpr,
    block_r: tl.constexpr,
    block_n: tl.constexpr,
):
    """Return the values at `place` [rows, block_n] plus the adapter's part, rounded to their type, in fp32."""
    values = tl.load(place, mask=is_member[:, None] & within[None, :], other=0.0)
    dtype: tl.constexpr = values.dtype
    columns = column + tl.arange(0, block_n)
    delta = tile_delta(
        hidden,
        entry,
        rank,
        width,
        columns,
        is_member,
        within,
        pages,
        split_stride,
        dtype,
        splits,
        page_type,
        assembly,
        aligned,
        block_m,
        block_r,
        block_n,
    )
    return (values.to(tl.float32) + delta).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def expand_rotary_kernel(  # type: ignore[no-untyped-def]
    qkv,  # [rows, (heads + 2 kv_heads) * size]
    kv_cache,  # [slots, 2, kv_heads, size]; of bytes if `quantized`
    positions,
    slots,
    cos,  # [positions, half] fp32; only with half > 0
    sin,
    q_norm,  # [size]; only with `normed`
    k_norm,
    table,  # see LoraSite
    order,
    starts,
    ends,
    chunk_slots,
    hidden,  # [splits, rows, 3, hidden_ranks] fp32
    num_rows,
    pages,
    hidden_ranks,
    row_stride,
    token_stride,
    heads,
    kv_heads,
    epsilon,
    key_inverse,
    value_inverse,
    half: tl.constexpr,
    size: tl.constexpr,
    normed: tl.constexpr,
    quantized: tl.constexpr,
    splits: tl.constexpr,
    page_type: tl.constexpr,
    assembly: tl.constexpr,
    aligned: tl.constexpr,
    block_m: tl.constexpr,
    block_r: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
) -> None:
    """Head `program_id(1)` of a chunk of rows, in up to three parts as in `rotary_kernel`."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    slot, begin, end = chunk_at(starts, ends, chunk_slots, chunk)
    if begin >= end:
        return
    rows, is_member = rows_of_chunk(order, begin, end, block_m)
    is_query, is_value = head < heads, head >= heads + kv_heads
    part = tl.where(is_query, 0, tl.where(is_value, 2, 1))
    width = tl.where(is_query, heads, kv_heads) * size
    column = (head - tl.where(is_query, 0, tl.where(is_value, heads + kv_heads, heads))) * size
    if aligned:
        width = tl.multiple_of(width, 16)
        column = tl.multiple_of(column, 16)
    entry = entry_at(table, tl.maximum(slot, 0), 3, part, pages)
    rank = rank_at(entry, slot)
    hidden += (rows[:, None] * 3 + part) * hidden_ranks
    split_stride = tl.cast(num_rows, tl.int64) * 3 * hidden_ranks
    kv_slot = tl.load(slots + rows, mask=is_member, other=-1)[:, None]
    is_cached = (kv_slot >= 0) & (head >= heads)
    inverse = tl.where(is_value, value_inverse, key_inverse)
    place = qkv + rows[:, None] * row_stride + head * size
    cell = kv_cache + kv_slot * token_stride + (head - heads) * size
    dtype: tl.constexpr = qkv.dtype.element_ty
    pair = tl.arange(0, block_half)
    rest = tl.arange(0, block_rest)
    is_pair = is_member[:, None] & (pair < half)[None, :]
    is_rest = is_member[:, None] & (rest < size - 2 * half)[None, :]
    pairs, rests = pair[None, :], 2 * half + rest[None, :]
    if half > 0:
        first = adapted(
            place + pairs, column, pair < half, hidden, entry, rank, width, is_member, pages, split_stride,
            splits, page_type, assembly, aligned, block_m, block_r, block_half,
        )  # fmt: skip
        second = adapted(
            place + half + pairs, column + half, pair < half, hidden, entry, rank, width, is_member, pages,
            split_stride, splits, page_type, assembly, aligned, block_m, block_r, block_half,
        )  # fmt: skip
        new_first, new_second = first, second
    if 2 * half < size:
        third = adapted(
            place + rests, column + 2 * half, rest < size - 2 * half, hidden, entry, rank, width, is_member,
            pages, split_stride, splits, page_type, assembly, aligned, block_m, block_r, block_rest,
        )  # fmt: skip
        new_third = third
    if normed:
        total = tl.zeros((block_m,), dtype=tl.float32)
        if half > 0:
            total += square_sums(first) + square_sums(second)
        if 2 * half < size:
            total += square_sums(third)
        scale = inverse_rms(total, size, epsilon)[:, None]
        if half > 0:
            new_first *= scale * norm_weights(q_norm, k_norm, pairs, half, is_query)
            new_second *= scale * norm_weights(q_norm, k_norm, half + pairs, 2 * half, is_query)
            new_first, new_second = new_first.to(dtype).to(tl.float32), new_second.to(dtype).to(tl.float32)
        if 2 * half < size:
            new_third *= scale * norm_weights(q_norm, k_norm, rests, size, is_query)
    if half > 0:
        angle = tl.load(positions + rows, mask=is_member, other=0)[:, None] * half + pairs
        cosines = tl.load(cos + angle, mask=is_pair, other=0.0)
        sines = tl.load(sin + angle, mask=is_pair, other=0.0)
        new_first, new_second = rotated(new_first, new_second, cosines, sines)
        store_part(
            first, new_first, place + pairs, cell + pairs, is_pair, is_value, is_cached, inverse, True, quantized
        )  # fmt: skip
        store_part(
            second, new_second, place + half + pairs, cell + half + pairs, is_pair, is_value, is_cached, inverse,
            True, quantized,
        )  # fmt: skip
    if 2 * half < size:
        # Written whether or not it is normed: it contains the adapter's part.
        store_part(
            third, new_third, place + rests, cell + rests, is_rest, is_value, is_cached, inverse, True, quantized
        )  # fmt: skip


def expand_rotary_write_kv(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    kv_scales: tuple[float, float],
    delta: PendingDelta,
) -> None:
    """`rotary_write_kv` of qkv + delta. V in `qkv` is undefined afterwards: attention reads it from the cache."""
    site, batch = delta.site, delta.batch
    columns = qkv.shape[1]
    kv_heads, size = kv_cache.shape[3], kv_cache.shape[4]
    half = 0 if rope is None else rope[0].shape[1]
    quantized = kv_cache.dtype is torch.float8_e4m3fn
    launch_kernel(
        expand_rotary_kernel,
        (batch.num_chunks, columns // size),
        qkv,
        kv_cache.view(torch.uint8) if quantized else kv_cache,
        positions,
        slots,
        *(rope or (qkv, qkv)),
        *(norms or (qkv, qkv)),
        site.table,
        *batch.chunk_lists,
        delta.hidden,
        batch.num_rows,
        site.max_pages,
        hidden_ranks(site),
        qkv.stride(0),
        kv_cache.stride(1),
        columns // size - 2 * kv_heads,
        kv_heads,
        epsilon,
        1 / kv_scales[0],
        1 / kv_scales[1],
        half=half,
        size=size,
        normed=norms is not None,
        quantized=quantized,
        splits=triton.cdiv(site.inputs, SPLIT_K),
        page_type=page_type(site, qkv.dtype),
        assembly=qkv.is_cuda,
        aligned=is_aligned(size),
        block_m=batch.path.chunk_rows,
        block_r=PAGE_RANKS,
        block_half=max(triton.next_power_of_2(max(half, 1)), MIN_COLUMNS),
        block_rest=max(triton.next_power_of_2(max(size - 2 * half, 1)), MIN_COLUMNS),
        num_warps=NUM_WARPS,
        num_stages=TILE_STAGES,
        enable_fp_fusion=True,
    )
