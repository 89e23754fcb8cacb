"""SiLU(gate) * up of a gated MLP (Shazeer 2020) in Triton, with and without SGMV's expand folded in.

The folded kernel serves steps of few adapters, where launches cost more than bytes. Invariant: every row is in a chunk,
base rows too.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.launch_plans import launch_kernel
from loraplex.engine.kernels.triton.lora_expand import TILE_N, TILE_STAGES, tile_delta, tile_warps
from loraplex.engine.kernels.triton.lora_pages import (
    chunk_at,
    entry_at,
    hidden_ranks,
    is_aligned,
    page_type,
    rank_at,
    rows_of_chunk,
)
from loraplex.engine.lora.device_batch import PendingDelta
from loraplex.engine.lora.page_geometry import PAGE_RANKS, SPLIT_K

BLOCK = 1024
"""Columns per program: a load of 16 bytes of each half a thread, and 14 programs for one row of Llama 3 8B."""
NUM_WARPS = 4


@triton.jit
def gated(gate, up):  # type: ignore[no-untyped-def]
    """SiLU(gate) * up in fp32. For gates below -88 the divisor overflows to infinity, and the quotient is correctly 0."""
    wide = gate.to(tl.float32)
    return wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up,  # [rows, 2 * size]
    out,  # [rows, size]
    size,
    block: tl.constexpr,
) -> None:
    """Row `program_id(0)`, its columns from `program_id(1) * block`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    within = columns < size
    gates = gate_up + row * 2 * size + columns
    gate = tl.load(gates, mask=within, other=0.0)
    up = tl.load(gates + size, mask=within, other=0.0)
    tl.store(out + row * size + columns, gated(gate, up).to(out.dtype.element_ty), mask=within)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_mul`; rounded once. `gate_up` is contiguous."""
    rows, doubled = gate_up.shape
    size = doubled // 2
    out = gate_up.new_empty(rows, size)
    launch_kernel(
        silu_mul_kernel,
        (rows, triton.cdiv(size, BLOCK)),
        gate_up,
        out,
        size,
        block=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def expand_silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up,  # [rows, 2 * size]
    out,  # [rows, size]
    table,  # see LoraSite
    order,
    starts,
    ends,
    chunk_slots,
    hidden,  # [splits, rows, 2, hidden_ranks] fp32
    num_rows,
    size,
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
    """One chunk of rows and `block_n` columns."""
    chunk = tl.program_id(0)
    slot, begin, end = chunk_at(starts, ends, chunk_slots, chunk)
    if begin >= end:
        return
    rows, is_member = rows_of_chunk(order, begin, end, block_m)
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    within = columns < size
    mask = is_member[:, None] & within[None, :]
    gates = gate_up + rows[:, None] * 2 * size + columns[None, :]
    gate = tl.load(gates, mask=mask, other=0.0)
    up = tl.load(gates + size, mask=mask, other=0.0)
    dtype: tl.constexpr = gate_up.dtype.element_ty
    entry = entry_at(table, tl.maximum(slot, 0), 2, 0, pages)
    hidden += rows[:, None] * 2 * hidden_ranks
    split_stride = tl.cast(num_rows, tl.int64) * 2 * hidden_ranks
    gate_delta = tile_delta(
        hidden,
        entry,
        rank_at(entry, slot),
        size,
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
    entry = entry_at(table, tl.maximum(slot, 0), 2, 1, pages)
    up_delta = tile_delta(
        hidden + hidden_ranks,
        entry,
        rank_at(entry, slot),
        size,
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
    # Rounded like the projection's output wherever that is stored.
    gate = (gate.to(tl.float32) + gate_delta).to(dtype)
    up = (up.to(tl.float32) + up_delta).to(dtype)
    tl.store(out + rows[:, None] * size + columns[None, :], gated(gate, up).to(dtype), mask=mask)


def expand_silu_mul(gate_up: torch.Tensor, delta: PendingDelta) -> torch.Tensor:
    """`silu_mul` of gate_up + delta. `gate_up` is contiguous."""
    site, batch = delta.site, delta.batch
    size = site.slice_sizes[0]
    out = gate_up.new_empty(gate_up.shape[0], size)
    launch_kernel(
        expand_silu_mul_kernel,
        (batch.num_chunks, triton.cdiv(size, TILE_N)),
        gate_up,
        out,
        site.table,
        *batch.chunk_lists,
        delta.hidden,
        batch.num_rows,
        size,
        site.max_pages,
        hidden_ranks(site),
        splits=triton.cdiv(site.inputs, SPLIT_K),
        page_type=page_type(site, gate_up.dtype),
        assembly=gate_up.is_cuda,
        aligned=is_aligned(size),
        block_m=batch.path.chunk_rows,
        block_r=PAGE_RANKS,
        block_n=TILE_N,
        enable_fp_fusion=True,
        num_warps=tile_warps(batch.path.chunk_rows),
        num_stages=TILE_STAGES,
    )
    return out
