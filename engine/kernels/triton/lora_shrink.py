"""SGMV's first half (Punica, Chen et al. 2023) in Triton: hidden = x A^T, in partial sums over K.

Invariant: K alone decides where a sum is split, and there are no atomics: a row's result does not depend on its batch.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.launch_plans import launch_kernel
from loraplex.engine.kernels.triton.lora_pages import (
    chunk_at,
    entry_at,
    hidden_ranks,
    is_aligned,
    page_at,
    page_type,
    rank_scales,
    rows_of_chunk,
    widened,
)
from loraplex.engine.lora.device_batch import DeviceLoraBatch
from loraplex.engine.lora.page_geometry import PAGE_RANKS, SPLIT_K
from loraplex.engine.lora.site import LoraSite

TILE_BYTES = 512
"""Inputs of a row of x in a tensor-core tile: with three stages, most of a program's share of A is loaded at once."""
ODD_TILE_BYTES = 64
"""The same where rows do not start at 16 bytes: every element of a tile then has its own address."""
TILE_WARPS = 4
TILE_STAGES = 3
ROW_WARPS = 4
ROW_BYTES = 512
"""A warp's widest load. In a tile that is one load wide, warps take different ranks, so that few sums cross lanes."""


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def shrink_tile_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, inputs]
    table,  # see LoraSite
    order,
    starts,
    ends,
    slots,
    hidden,  # [splits, rows, slices, hidden_ranks] fp32
    num_rows,
    inputs,
    slices,
    pages,
    hidden_ranks,
    page_type: tl.constexpr,
    is_scaled: tl.constexpr,
    assembly: tl.constexpr,
    aligned: tl.constexpr,
    split_k: tl.constexpr,
    block_m: tl.constexpr,
    block_r: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """One chunk of rows, one share of K, one slice: all ranks of the slice, a page at a time, on tensor cores."""
    chunk = tl.program_id(0)
    split = tl.program_id(1)
    part = tl.program_id(2)
    slot, begin, end = chunk_at(starts, ends, slots, chunk)
    if slot < 0:
        return
    entry = entry_at(table, slot, slices, part, pages)
    rank = tl.load(entry).to(tl.int32)
    if rank == 0:
        return
    rows, is_member = rows_of_chunk(order, begin, end, block_m)
    x_rows = x + rows[:, None] * inputs
    first = split * split_k
    last = tl.minimum(first + split_k, inputs)
    hidden += ((split.to(tl.int64) * num_rows + rows[:, None]) * slices + part) * hidden_ranks
    within_page = tl.arange(0, block_r)
    for page in range(tl.cdiv(rank, block_r)):
        ranks = page * block_r + within_page
        is_rank = ranks < rank
        a = page_at(entry, 2 + page, page_type, aligned)
        scales = rank_scales(entry, ranks, is_rank, is_scaled)
        total = tl.zeros((block_m, block_r), dtype=tl.float32)
        for k in range(first, last, block_k):
            columns = k + tl.arange(0, block_k)
            within = columns < last
            x_tile = tl.load(x_rows + columns[None, :], mask=is_member[:, None] & within[None, :], other=0.0)
            stored = tl.load(
                a + within_page[None, :] * inputs + columns[:, None],
                mask=is_rank[None, :] & within[:, None],
                other=0.0,
            )
            a_tile = widened(stored, x.dtype.element_ty, assembly)
            total = tl.dot(x_tile, a_tile, total, input_precision="ieee")
        if is_scaled:
            total *= scales[None, :]
        tl.store(hidden + ranks[None, :], total, mask=is_member[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def shrink_row_kernel(  # type: ignore[no-untyped-def]
    x,
    table,
    row_slots,
    hidden,
    num_rows,
    inputs,
    slices,
    pages,
    hidden_ranks,
    page_type: tl.constexpr,
    is_scaled: tl.constexpr,
    assembly: tl.constexpr,
    aligned: tl.constexpr,
    split_k: tl.constexpr,
    block_r: tl.constexpr,
    span: tl.constexpr,
) -> None:
    """`shrink_tile_kernel` for one row: one product per weight, for 8-bit weights a third of the instructions."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    part = tl.program_id(2)
    slot = tl.load(row_slots + row).to(tl.int64)
    if slot < 0:
        return
    entry = entry_at(table, slot, slices, part, pages)
    rank = tl.load(entry).to(tl.int32)
    if rank == 0:
        return
    within_page = tl.arange(0, block_r)
    within_span = tl.arange(0, span)
    hidden += ((split.to(tl.int64) * num_rows + row) * slices + part) * hidden_ranks
    x_row = x + row * inputs
    for page in range(tl.cdiv(rank, block_r)):
        ranks = page * block_r + within_page
        is_rank = ranks < rank
        a = page_at(entry, 2 + page, page_type, aligned)
        scales = rank_scales(entry, ranks, is_rank, is_scaled)
        # Issue all loads before the first product: x reaches the lanes through shared memory, which waits for it.
        x_parts = ()
        a_parts = ()
        for turn in tl.static_range(split_k // span):
            columns = split * split_k + turn * span + within_span
            part_of_x = tl.load(x_row + columns, mask=columns < inputs, other=0.0)
            x_parts += (part_of_x,)  # type: ignore[assignment]
        for turn in tl.static_range(split_k // span):
            columns = split * split_k + turn * span + within_span
            stored = tl.load(
                a + within_page[:, None] * inputs + columns[None, :],
                mask=is_rank[:, None] & (columns < inputs)[None, :],
                other=0.0,
            )
            a_parts += (stored,)  # type: ignore[assignment]
        total = tl.zeros((block_r, span), dtype=tl.float32)
        for turn in tl.static_range(split_k // span):
            total += widened(a_parts[turn], tl.float32, assembly) * x_parts[turn].to(tl.float32)[None, :]
        sums = tl.sum(total, axis=1) * scales
        tl.store(hidden + ranks, sums, mask=is_rank)


def shrink(x: torch.Tensor, site: LoraSite, batch: DeviceLoraBatch, hidden: torch.Tensor) -> None:
    """The hidden values of every adapter's rows, scaled, into `hidden` [splits, rows, slices, ranks]; others stay."""
    splits = triton.cdiv(site.inputs, SPLIT_K)
    pages = page_type(site, x.dtype)
    operands = hidden, batch.num_rows, site.inputs, len(site.names), site.max_pages, hidden_ranks(site)
    options = {
        "page_type": pages,
        "is_scaled": site.page_dtype is not None,
        "assembly": x.is_cuda,
        "aligned": is_aligned(site.inputs),
        "split_k": SPLIT_K,
        "block_r": PAGE_RANKS,
        "enable_fp_fusion": True,
    }
    grid = batch.num_chunks, splits, len(site.names)
    if batch.chunks is None:
        span = row_span(pages)
        launch_kernel(
            shrink_row_kernel,
            grid,
            x,
            site.table,
            batch.row_slots,
            *operands,
            **options,
            span=span,
            num_warps=ROW_WARPS,
        )
    else:
        launch_kernel(
            shrink_tile_kernel,
            grid,
            x,
            site.table,
            *batch.chunks.lists,
            *operands,
            **options,
            block_m=batch.path.chunk_rows,
            block_k=tile_inputs(x.dtype, is_aligned(site.inputs)),
            num_warps=TILE_WARPS,
            num_stages=TILE_STAGES,
        )


def tile_inputs(dtype: torch.dtype, aligned: bool) -> int:
    """Inputs of a tensor-core tile."""
    return (TILE_BYTES if aligned else ODD_TILE_BYTES) // dtype.itemsize


def row_span(pages: tl.dtype) -> int:
    """Elements of one load of a warp."""
    return ROW_BYTES * 8 // int(pages.primitive_bitwidth)
