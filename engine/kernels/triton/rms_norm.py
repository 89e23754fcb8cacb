"""RMSNorm (Zhang & Sennrich 2019) with the residual added before it, in Triton, with and without SGMV's expand folded in.

One program per row. The folded kernel serves steps of few adapters, where launches cost more than bytes: rows that share an
adapter read it from cache.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.launch_plans import launch_kernel
from loraplex.engine.kernels.triton.lora_expand import row_delta
from loraplex.engine.kernels.triton.lora_pages import entry_at, hidden_ranks, is_aligned, page_type, rank_at
from loraplex.engine.lora.device_batch import PendingDelta
from loraplex.engine.lora.page_geometry import PAGE_RANKS, SPLIT_K

WARP_COLUMNS = 512
"""Columns per warp: two loads of 16 bytes a thread, so that a row of 4096 loads all its bytes at once."""
MAX_WARPS = 16


@triton.jit
def inverse_rms(square_sum, size, epsilon):  # type: ignore[no-untyped-def]
    """One over the root mean square of `size` values, given the sum of their squares in fp32."""
    return tl.rsqrt(square_sum / size + epsilon)


@triton.jit
def normalized(values, weight, size, epsilon):  # type: ignore[no-untyped-def]
    """Return the norm of one row in fp32. `values` are fp32 and 0 after the row's `size` columns."""
    return values * inverse_rms(tl.sum(values * values, 0), size, epsilon) * weight.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, size]
    residual,  # [rows, size], written; only with `has_residual`
    weight,
    out,
    size,
    epsilon,
    has_residual: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Row `program_id(0)`, whole."""
    columns = tl.arange(0, block)
    within = columns < size
    place = tl.program_id(0).to(tl.int64) * size + columns
    values = tl.load(x + place, mask=within, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=within, other=0.0)
    if has_residual:
        values += tl.load(residual + place, mask=within, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + place, rounded, mask=within)
        values = rounded.to(tl.float32)
    result = normalized(values, scales, size, epsilon)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=within)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """See `reference.rms_norm`. x and residual are contiguous."""
    out = torch.empty_like(x)
    rows, size = x.shape
    block: int = triton.next_power_of_2(size)
    launch_kernel(
        rms_norm_kernel,
        (rows,),
        x,
        x if residual is None else residual,
        weight,
        out,
        size,
        epsilon,
        has_residual=residual is not None,
        block=block,
        num_warps=warps_for(block),
        enable_fp_fusion=True,
    )
    return out


def warps_for(block: int) -> int:
    """Warps of a program for rows of `block` columns, a power of two."""
    return min(max(block // WARP_COLUMNS, 1), MAX_WARPS)


TILE_VALUES = 32768
"""Weights loaded at once: 64 KiB of bf16, in at most half of the registers of a program's threads."""


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def expand_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, size]
    residual,  # [rows, size], written; only with `has_residual`
    weight,
    out,
    table,  # see LoraSite
    row_slots,
    hidden,  # [splits, rows, hidden_ranks] fp32
    num_rows,
    size,
    epsilon,
    pages,
    hidden_ranks,
    has_residual: tl.constexpr,
    splits: tl.constexpr,
    split_lanes: tl.constexpr,
    page_type: tl.constexpr,
    assembly: tl.constexpr,
    aligned: tl.constexpr,
    block_r: tl.constexpr,
    page_ranks: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Row `program_id(0)`, whole."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots + row).to(tl.int64)
    columns = tl.arange(0, block)
    within = columns < size
    place = row * size + columns
    values = tl.load(x + place, mask=within, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=within, other=0.0)
    if has_residual:
        before = tl.load(residual + place, mask=within, other=0.0).to(tl.float32)
    entry = entry_at(table, tl.maximum(slot, 0), 1, 0, pages)
    delta = row_delta(
        tl.zeros((block,), dtype=tl.float32),
        hidden + row * hidden_ranks,
        entry,
        rank_at(entry, slot),
        size,
        columns,
        within,
        pages,
        tl.cast(num_rows, tl.int64) * hidden_ranks,
        splits,
        split_lanes,
        page_type,
        assembly,
        aligned,
        block_r,
        page_ranks,
    )
    # Rounded like the projection's output wherever that is stored.
    values = (values + delta).to(x.dtype.element_ty).to(tl.float32)
    if has_residual:
        rounded = (values + before).to(residual.dtype.element_ty)
        tl.store(residual + place, rounded, mask=within)
        values = rounded.to(tl.float32)
    result = normalized(values, scales, size, epsilon)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=within)


def expand_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, delta: PendingDelta
) -> torch.Tensor:
    """`rms_norm` of x + delta. x and residual are contiguous."""
    site, batch = delta.site, delta.batch
    out = torch.empty_like(x)
    rows, size = x.shape
    block: int = triton.next_power_of_2(size)
    splits = triton.cdiv(site.inputs, SPLIT_K)
    launch_kernel(
        expand_rms_norm_kernel,
        (rows,),
        x,
        x if residual is None else residual,
        weight,
        out,
        site.table,
        batch.row_slots,
        delta.hidden,
        batch.num_rows,
        size,
        epsilon,
        site.max_pages,
        hidden_ranks(site),
        has_residual=residual is not None,
        splits=splits,
        split_lanes=triton.next_power_of_2(splits),
        page_type=page_type(site, x.dtype),
        assembly=x.is_cuda,
        aligned=is_aligned(size),
        block_r=ranks_at_once(block),
        page_ranks=PAGE_RANKS,
        block=block,
        num_warps=warps_for_expand(block),
        enable_fp_fusion=True,
    )
    return out


def ranks_at_once(block: int) -> int:
    """Ranks of a tile, a power of two."""
    return min(max(TILE_VALUES // block, 1), PAGE_RANKS)


def warps_for_expand(block: int) -> int:
    """Warps of a program for rows of `block` columns: twice those of a norm alone."""
    return min(max(2 * block // WARP_COLUMNS, 1), MAX_WARPS)
