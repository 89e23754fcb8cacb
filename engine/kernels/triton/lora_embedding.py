"""Adapters of an embedding in Triton: a row's hidden values are the column of A for its token.

Invariant: a row's sum depends on its token and its adapter alone.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.launch_plans import launch_kernel
from loraplex.engine.kernels.triton.lora_pages import (
    entry_at,
    is_aligned,
    page_at,
    page_type,
    rank_scales,
    widened,
)
from loraplex.engine.lora.device_batch import DeviceLoraBatch
from loraplex.engine.lora.page_geometry import PAGE_RANKS
from loraplex.engine.lora.site import LoraSite

BLOCK_N = 1024
NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def embedding_kernel(  # type: ignore[no-untyped-def]
    token_ids,  # [rows] int64
    y,  # [rows, outputs]
    table,  # see LoraSite
    row_slots,
    vocab,
    outputs,
    pages,
    page_type: tl.constexpr,
    is_scaled: tl.constexpr,
    assembly: tl.constexpr,
    aligned: tl.constexpr,
    block_r: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    """`block_n` outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots + row).to(tl.int64)
    token = tl.load(token_ids + row)
    if slot < 0:
        return
    entry = entry_at(table, slot, 1, 0, pages)
    rank = tl.load(entry).to(tl.int32)
    if rank == 0:
        return
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    within = columns < outputs
    target = y + row * outputs + columns
    before = tl.load(target, mask=within, other=0.0)
    within_page = tl.arange(0, block_r)
    total = tl.zeros((block_n,), dtype=tl.float32)
    for page in range(tl.cdiv(rank, block_r)):
        ranks = page * block_r + within_page
        is_rank = ranks < rank
        a = page_at(entry, 2 + page, page_type, False)
        column = tl.load(a + within_page * vocab + token, mask=is_rank, other=0.0)
        h = column.to(tl.float32) * rank_scales(entry, ranks, is_rank, is_scaled)
        b = page_at(entry, 2 + pages + page, page_type, aligned)
        stored = tl.load(
            b + within_page[:, None] * outputs + columns[None, :],
            mask=is_rank[:, None] & within[None, :],
            other=0.0,
        )
        total += tl.sum(widened(stored, tl.float32, assembly) * h[:, None], axis=0)
    tl.store(target, (before.to(tl.float32) + total).to(y.dtype.element_ty), mask=within)


def add_embedding(token_ids: torch.Tensor, y: torch.Tensor, site: LoraSite, batch: DeviceLoraBatch) -> None:
    """y[row] += A[:, token of row] B for rows whose adapter trained the embedding, in place. y [rows, outputs]."""
    launch_kernel(
        embedding_kernel,
        (batch.num_rows, triton.cdiv(site.outputs, BLOCK_N)),
        token_ids,
        y,
        site.table,
        batch.row_slots,
        site.inputs,
        site.outputs,
        site.max_pages,
        page_type=page_type(site, y.dtype),
        is_scaled=site.page_dtype is not None,
        assembly=y.is_cuda,
        aligned=is_aligned(site.outputs),
        block_r=PAGE_RANKS,
        block_n=BLOCK_N,
        enable_fp_fusion=True,
        num_warps=NUM_WARPS,
    )
