"""SGMV (Punica, Chen et al. 2023) in Triton: shrink into partial sums over K, expand sums them in order and adds to y.

Invariant: one tile shape for every group and no atomics, so a row's result does not depend on who shares its batch.
"""

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.engine.lora.batch import LoraGroups
from loraplex.engine.lora.site import MAX_RANK, LoraSite

BLOCK_M = 16
"""Rows of a tile: the least a tensor core takes. Decode groups have one or two; tiles above 32 turn into wgmma, whose
register operands gave NaN in other engines' expand kernels."""
BLOCK_R = 16
"""Ranks of a tile: the least K of a bf16 product, so that expand never pads more than one tile of an odd rank."""
BLOCK_K = 128
"""256 bytes of a bf16 row of A per load: whole sectors, 4 KiB of A in flight per stage."""
SPLIT_K = 1024
"""Inputs per shrink program: 32 KiB of A at rank 16, about 1 us at one SM's share of the bandwidth. Depends on no batch."""
BLOCK_N = 128
"""Outputs per expand program: with 4096 outputs 32 programs per row tile, so that even one adapter spreads over the GPU."""
NUM_WARPS = 4
NUM_STAGES = 3


@triton.jit  # type: ignore[untyped-decorator]
def shrink_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, inputs]
    table,  # see LoraSite
    order,
    starts,
    slots,
    hidden,  # [splits, grouped rows, slices, hidden_ranks] fp32
    num_rows,
    inputs,
    slices,
    pages,
    hidden_ranks,
    aligned: tl.constexpr,
    split_k: tl.constexpr,
    block_m: tl.constexpr,
    block_r: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """One row tile of one group, one slice, one share of K: all ranks of the slice, 16 at a time."""
    group = tl.program_id(1)
    part = tl.program_id(2) % slices
    split = tl.program_id(2) // slices
    begin = tl.load(starts + group) + tl.program_id(0) * block_m
    end = tl.load(starts + group + 1)
    entry = table + (tl.load(slots + group).to(tl.int64) * slices + part) * (2 + 2 * pages)
    rank = tl.load(entry).to(tl.int32)
    if begin >= end or rank == 0:
        return
    members = begin + tl.arange(0, block_m)
    is_member = members < end
    rows = tl.load(order + members, mask=is_member, other=0).to(tl.int64)
    x_rows = x + rows[:, None] * inputs
    first = split * split_k
    last = tl.minimum(first + split_k, inputs)
    hidden += (split.to(tl.int64) * num_rows + members[:, None]) * slices * hidden_ranks + part * hidden_ranks
    for r in range(0, rank, block_r):
        ranks = r + tl.arange(0, block_r)
        a = tl.load(entry + 2 + r // block_r).to(tl.pointer_type(x.dtype.element_ty))
        if aligned:
            a = tl.multiple_of(a, 16)
        total = tl.zeros((block_m, block_r), dtype=tl.float32)
        for k in range(first, last, block_k):
            columns = k + tl.arange(0, block_k)
            within = columns < last
            x_tile = tl.load(x_rows + columns[None, :], mask=is_member[:, None] & within[None, :], other=0.0)
            a_tile = tl.load(
                a + tl.arange(0, block_r)[None, :] * inputs + columns[:, None],
                mask=(ranks < rank)[None, :] & within[:, None],
                other=0.0,
            )
            total = tl.dot(x_tile, a_tile, total, input_precision="ieee")
        tl.store(hidden + ranks[None, :], total, mask=is_member[:, None] & (ranks < rank)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def expand_kernel(  # type: ignore[no-untyped-def]
    y,  # [rows, outputs]
    table,
    offsets,  # [slices + 1] int64
    order,
    starts,
    slots,
    hidden,
    num_rows,
    outputs,
    slices,
    pages,
    hidden_ranks,
    splits,
    aligned: tl.constexpr,
    block_m: tl.constexpr,
    block_r: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    """One row tile of one group and `block_n` outputs of one slice."""
    group = tl.program_id(1)
    part = tl.program_id(2) % slices
    column = tl.program_id(2) // slices * block_n
    begin = tl.load(starts + group) + tl.program_id(0) * block_m
    end = tl.load(starts + group + 1)
    entry = table + (tl.load(slots + group).to(tl.int64) * slices + part) * (2 + 2 * pages)
    rank = tl.load(entry).to(tl.int32)
    offset = tl.load(offsets + part)
    size = (tl.load(offsets + part + 1) - offset).to(tl.int32)
    if begin >= end or rank == 0 or column >= size:
        return
    if aligned:
        size = tl.multiple_of(size, 16)
        offset = tl.multiple_of(offset, 16)
    members = begin + tl.arange(0, block_m)
    is_member = members < end
    rows = tl.load(order + members, mask=is_member, other=0).to(tl.int64)
    columns = column + tl.arange(0, block_n)
    within = columns < size
    hidden += members[:, None].to(tl.int64) * slices * hidden_ranks + part * hidden_ranks
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for r in range(0, rank, block_r):
        ranks = r + tl.arange(0, block_r)
        is_rank = ranks < rank
        h = tl.zeros((block_m, block_r), dtype=tl.float32)
        share = hidden + ranks[None, :]
        for _ in range(splits):
            h += tl.load(share, mask=is_member[:, None] & is_rank[None, :], other=0.0)
            share += num_rows * slices * hidden_ranks
        b = tl.load(entry + 2 + pages + r // block_r).to(tl.pointer_type(y.dtype.element_ty))
        if aligned:
            b = tl.multiple_of(b, 16)
        b_tile = tl.load(
            b + tl.arange(0, block_r)[:, None] * size + columns[None, :],
            mask=is_rank[:, None] & within[None, :],
            other=0.0,
        )
        total = tl.dot(h.to(b_tile.dtype), b_tile, total, input_precision="ieee")
    target = y + rows[:, None] * outputs + offset + columns[None, :]
    mask = is_member[:, None] & within[None, :]
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (before + total).to(y.dtype.element_ty), mask=mask)


def sgmv(x: torch.Tensor, y: torch.Tensor, site: LoraSite, groups: LoraGroups) -> None:
    """See `reference.sgmv`; the sums are fp32, and y is rounded once."""
    splits = triton.cdiv(site.inputs, SPLIT_K)
    slices = len(site.names)
    # Strided by the greatest rank there is, so that the layout is known without asking for the batch's adapters.
    hidden = torch.empty(splits, groups.num_rows, slices, MAX_RANK, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(_largest_group(groups), BLOCK_M)
    members: tuple[Any, ...] = (groups.order, groups.starts, groups.slots, hidden, groups.num_rows)
    tile = {"block_m": BLOCK_M, "block_r": BLOCK_R, "enable_fp_fusion": True}
    width = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES}
    shrink_kernel[tiles, len(groups.host_slots), slices * splits](
        x,
        site.table,
        *members,
        site.inputs,
        slices,
        site.max_pages,
        MAX_RANK,
        aligned=_is_aligned(site.inputs),
        split_k=SPLIT_K,
        block_k=BLOCK_K,
        **tile,
        **width,
    )
    columns = triton.cdiv(max(site.slice_sizes), BLOCK_N)
    expand_kernel[tiles, len(groups.host_slots), slices * columns](
        y,
        site.table,
        site.offsets,
        *members,
        site.outputs,
        slices,
        site.max_pages,
        MAX_RANK,
        splits,
        aligned=_is_aligned(*site.slice_sizes),
        block_n=BLOCK_N,
        **tile,
        **width,
    )


def _largest_group(groups: LoraGroups) -> int:
    starts = groups.host_starts
    return max(end - start for start, end in pairwise(starts))


def _is_aligned(*row_lengths: int) -> bool:
    """Whether every row of A (or B) starts at 16 bytes, given that the matrix does (`LoraSite.install`)."""
    return all(length % 16 == 0 for length in row_lengths)
