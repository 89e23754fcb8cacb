"""SGMV's second half in Triton: y += hidden B, in place, with the partial sums added up in the order of K.

Invariant: a row's sum runs over its adapter's ranks in order, and y is rounded once.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.launch_plans import launch_kernel
from loraplex.engine.kernels.triton.lora_pages import (
    chunk_at,
    column_tile,
    entry_at,
    hidden_ranks,
    is_aligned,
    page_at,
    page_type,
    row_hidden,
    rows_of_chunk,
    sizes_of,
    tile_hidden,
    widened,
)
from loraplex.engine.lora.device_batch import DeviceLoraBatch
from loraplex.engine.lora.page_geometry import PAGE_RANKS, SPLIT_K
from loraplex.engine.lora.site import LoraSite

TILE_N = 128
"""Outputs per tensor-core program: with 4096 outputs 32 programs per chunk, so that even one adapter spreads over the GPU.
Chunks of more than 32 rows would turn into wgmma, whose register operands gave NaN in other engines' expand kernels."""
TILE_STAGES = 3
ROW_N = 1024
"""Outputs per program of a row: 32 KiB of a bf16 page, all loaded at once."""
ROW_LOAD_BYTES = 512
SMALL_GAIN = tl.constexpr(128.0)
"""Gain of the hidden values for 8-bit pages. Such hidden values are over a hundred times smaller than others, and float16
has few digits below 6e-5. A row's greatest 8-bit value is at least 127, so a row that overflows with this gain overflows y
without it."""


@triton.jit  # type: ignore[untyped-decorator]
def tile_delta(  # type: ignore[no-untyped-def]
    hidden,  # of each row [rows, 1] and the slice
    entry,
    rank,
    size,
    columns,
    is_member,
    within,
    pages,
    split_stride,
    dtype: tl.constexpr,
    splits: tl.constexpr,
    page_type: tl.constexpr,
    assembly: tl.constexpr,
    aligned: tl.constexpr,
    block_m: tl.constexpr,
    block_r: tl.constexpr,
    block_n: tl.constexpr,
):
    """Return what an adapter adds to `columns` [block_n] of a slice in a chunk's rows, fp32 [block_m, block_n]."""
    is_small: tl.constexpr = dtype == tl.float16 and page_type != tl.float16
    within_page = tl.arange(0, block_r)
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for page in range(tl.cdiv(rank, block_r)):
        ranks = page * block_r + within_page
        is_rank = ranks < rank
        b = page_at(entry, 2 + pages + page, page_type, aligned)
        stored = tl.load(
            b + within_page[:, None] * size + columns[None, :],
            mask=is_rank[:, None] & within[None, :],
            other=0.0,
        )
        h = tile_hidden(hidden + ranks[None, :], is_member[:, None] & is_rank[None, :], split_stride, splits)
        if is_small:
            h *= SMALL_GAIN
        total = tl.dot(h.to(dtype), widened(stored, dtype, assembly), total, input_precision="ieee")
    if is_small:
        total *= 1 / SMALL_GAIN
    return total


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def expand_tile_kernel(  # type: ignore[no-untyped-def]
    y,  # [rows, outputs]
    table,  # see LoraSite
    order,
    starts,
    ends,
    slots,
    hidden,  # [splits, rows, slices, hidden_ranks] fp32
    num_rows,
    size_0,
    size_1,
    size_2,
    slices,
    pages,
    hidden_ranks,
    splits: tl.constexpr,
    page_type: tl.constexpr,
    assembly: tl.constexpr,
    aligned: tl.constexpr,
    block_m: tl.constexpr,
    block_r: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    """One chunk of rows and `block_n` outputs of one slice, on tensor cores."""
    chunk = tl.program_id(0)
    part, size, offset, column = column_tile(tl.program_id(1), size_0, size_1, size_2, aligned, block_n)
    slot, begin, end = chunk_at(starts, ends, slots, chunk)
    if slot < 0:
        return
    entry = entry_at(table, slot, slices, part, pages)
    rank = tl.load(entry).to(tl.int32)
    if rank == 0:
        return
    outputs = size_0 + size_1 + size_2
    rows, is_member = rows_of_chunk(order, begin, end, block_m)
    columns = column + tl.arange(0, block_n)
    within = columns < size
    target = y + rows[:, None] * outputs + offset + columns[None, :]
    mask = is_member[:, None] & within[None, :]
    before = tl.load(target, mask=mask, other=0.0)
    hidden += (rows[:, None] * slices + part) * hidden_ranks
    split_stride = tl.cast(num_rows, tl.int64) * slices * hidden_ranks
    total = tile_delta(
        hidden,
        entry,
        rank,
        size,
        columns,
        is_member,
        within,
        pages,
        split_stride,
        y.dtype.element_ty,
        splits,
        page_type,
        assembly,
        aligned,
        block_m,
        block_r,
        block_n,
    )
    tl.store(target, (before.to(tl.float32) + total).to(y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def row_delta(  # type: ignore[no-untyped-def]
    total,  # [columns] fp32
    hidden,  # of the row and slice
    entry,
    rank,
    size,
    columns,
    within,
    pages,
    split_stride,
    splits: tl.constexpr,
    split_lanes: tl.constexpr,
    page_type: tl.constexpr,
    assembly: tl.constexpr,
    aligned: tl.constexpr,
    block_r: tl.constexpr,
    page_ranks: tl.constexpr,
):
    """Return total + what an adapter adds to `columns` of one row, `block_r` ranks at a time."""
    for first in range(0, rank, block_r):
        ranks = first + tl.arange(0, block_r)
        is_rank = ranks < rank
        b = page_at(entry, 2 + pages + first // page_ranks, page_type, aligned)
        stored = tl.load(
            b + (ranks % page_ranks)[:, None] * size + columns[None, :],
            mask=is_rank[:, None] & within[None, :],
            other=0.0,
        )
        h = row_hidden(hidden, ranks, is_rank, split_stride, splits, split_lanes)
        total += tl.sum(widened(stored, tl.float32, assembly) * h[:, None], axis=0)
    return total


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def expand_row_kernel(  # type: ignore[no-untyped-def]
    y,
    table,
    row_slots,
    hidden,
    num_rows,
    size_0,
    size_1,
    size_2,
    slices,
    pages,
    hidden_ranks,
    splits: tl.constexpr,
    split_lanes: tl.constexpr,
    page_type: tl.constexpr,
    assembly: tl.constexpr,
    aligned: tl.constexpr,
    block_r: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    """`expand_tile_kernel` for one row: hidden values stay fp32, and one lane has every rank of a column."""
    row = tl.program_id(0).to(tl.int64)
    part, size, offset, column = column_tile(tl.program_id(1), size_0, size_1, size_2, aligned, block_n)
    slot = tl.load(row_slots + row).to(tl.int64)
    if slot < 0:
        return
    entry = entry_at(table, slot, slices, part, pages)
    rank = tl.load(entry).to(tl.int32)
    if rank == 0:
        return
    outputs = size_0 + size_1 + size_2
    columns = column + tl.arange(0, block_n)
    within = columns < size
    split_stride = tl.cast(num_rows, tl.int64) * slices * hidden_ranks
    target = y + row * outputs + offset + columns
    before = tl.load(target, mask=within, other=0.0)
    total = row_delta(
        tl.zeros((block_n,), dtype=tl.float32),
        hidden + (row * slices + part) * hidden_ranks,
        entry,
        rank,
        size,
        columns,
        within,
        pages,
        split_stride,
        splits,
        split_lanes,
        page_type,
        assembly,
        aligned,
        block_r,
        block_r,
    )
    tl.store(target, (before.to(tl.float32) + total).to(y.dtype.element_ty), mask=within)


def expand(hidden: torch.Tensor, y: torch.Tensor, site: LoraSite, batch: DeviceLoraBatch) -> None:
    """Add to `y` the deltas of the hidden values from `shrink`."""
    sizes = sizes_of(site)
    pages = page_type(site, y.dtype)
    block_n = ROW_N if batch.chunks is None else TILE_N
    grid = batch.num_chunks, sum(triton.cdiv(size, block_n) for size in sizes)
    operands = (
        hidden,
        batch.num_rows,
        *sizes,
        len(site.names),
        site.max_pages,
        hidden_ranks(site),
    )
    options = {
        "splits": triton.cdiv(site.inputs, SPLIT_K),
        "page_type": pages,
        "assembly": y.is_cuda,
        "aligned": is_aligned(*site.slice_sizes),
        "block_r": PAGE_RANKS,
        "block_n": block_n,
        "enable_fp_fusion": True,
    }
    if batch.chunks is None:
        launch_kernel(
            expand_row_kernel,
            grid,
            y,
            site.table,
            batch.row_slots,
            *operands,
            **options,
            split_lanes=triton.next_power_of_2(options["splits"]),
            num_warps=row_warps(pages, is_aligned(*site.slice_sizes)),
        )
    else:
        launch_kernel(
            expand_tile_kernel,
            grid,
            y,
            site.table,
            *batch.chunks.lists,
            *operands,
            **options,
            block_m=batch.path.chunk_rows,
            num_warps=tile_warps(batch.path.chunk_rows),
            num_stages=TILE_STAGES,
        )


def tile_warps(chunk_rows: int) -> int:
    """Warps with registers for a tile's sums and the partial sums of its hidden values."""
    return chunk_rows // 4


def row_warps(pages: tl.dtype, aligned: bool) -> int:
    """Warps that take `ROW_N` outputs in one load each, so that no column is shared between two; more for odd addresses."""
    return ROW_N * int(pages.primitive_bitwidth) // 8 // ROW_LOAD_BYTES if aligned else 8
