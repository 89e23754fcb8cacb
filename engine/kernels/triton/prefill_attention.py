"""Attention of prefill chunks of any lengths over their sequences' block tables (PagedAttention, Kwon et al. 2023) in
Triton, in one launch: each program finds its rows through a list of tiles.

Invariant: a query's tiles of keys depend neither on the other chunks nor on where its own begins or ends, nor does its
result.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.prefill_chunks import PREFILL_TILE, PrefillChunks
from loraplex.engine.kernels.triton.attention_tile import LOG2_E, NUM_WARPS, attend, padded, tile_tokens
from loraplex.engine.kernels.triton.launch_plans import launch_kernel

PREFILL_ROWS = 32
"""Queries of a program, every head of a group counted. From 64 on the probabilities would be a register operand of wgmma,
which gave NaN in other engines' kernels."""
MAX_PREFILL_VALUES = 32 * 256
"""Sums of a program, 64 a thread: with more, registers spill."""
PREFILL_STAGES = 5
"""A tile's address comes from the block table, whose load takes stages too: 2n + 1 of them keep n tiles in flight."""


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]
def prefill_kernel(  # type: ignore[no-untyped-def]
    qkv,
    out,
    kv_cache,
    ends,
    lengths,
    tables,
    tile_chunks,
    tile_begins,
    scale,
    value_scale,  # of a cache of 8 bits
    query_stride,
    out_stride,
    table_stride,
    block_stride,
    token_stride,
    kv_heads,
    group: tl.constexpr,
    window: tl.constexpr,
    block_size: tl.constexpr,
    size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    tile_rows: tl.constexpr,
) -> None:
    """`block_m` pairs of a tile's row and one of the query heads of one KV head, rows first."""
    parts: tl.constexpr = (tile_rows * group + block_m - 1) // block_m
    kv_head = tl.program_id(1)
    tile = tl.program_id(0) // parts
    # The last rows see the most keys, so they start first.
    pair = (parts - 1 - tl.program_id(0) % parts) * block_m
    named = tl.load(tile_chunks + tile)
    chunk = tl.maximum(named, 0).to(tl.int64)
    tile_begin = tl.load(tile_begins + tile)
    chunk_end = tl.load(ends + chunk)
    before = tl.load(lengths + chunk) - chunk_end
    # A padding tile has no rows, and neither has a part behind the chunk's end: no keys are read for them.
    tile_end = tl.where(named < 0, tile_begin, tl.minimum(tile_begin + tile_rows, chunk_end))
    first = tile_begin + pair // group
    past = tl.minimum(tile_begin + (pair + block_m - 1) // group + 1, tile_end)
    end = tl.where(first < past, before + past, 0)
    begin = first * 0
    if window > 0:
        # Tiles of keys start at the same ones wherever the chunk starts.
        begin = tl.maximum(before + first - window + 1, 0) // block_n * block_n
    pairs = pair + tl.arange(0, block_m)
    row = tile_begin + pairs // group
    columns = tl.arange(0, block_d)
    mask = (row < tile_end)[:, None] & (columns < size)[None, :]
    place = (kv_head * group + pairs % group)[:, None] * size + columns[None, :]
    wide_row = row.to(tl.int64)[:, None]
    total, weight, _ = attend(
        tl.load(qkv + wide_row * query_stride + place, mask=mask, other=0.0),
        before + row,
        kv_cache + kv_head * size,
        kv_heads * size,
        tables + chunk * table_stride,
        begin,
        end,
        block_stride,
        token_stride,
        scale,
        True,
        window,
        block_size,
        size,
        block_m,
        block_n,
        block_d,
    )
    result = total / weight[:, None] * value_scale
    tl.store(out + wide_row * out_stride + place, result.to(out.dtype.element_ty), mask=mask)


def prefill_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    chunks: PrefillChunks,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """See `reference.prefill_attention`. One launch, whose grid follows from the number of tiles: a graph can capture it."""
    _, block_size, _, kv_heads, size = kv_cache.shape
    group = out.shape[1] // size // kv_heads
    block_m = prefill_rows(size)
    parts = triton.cdiv(PREFILL_TILE * group, block_m)
    launch_kernel(
        prefill_kernel,
        (chunks.tile_chunks.shape[0] * parts, kv_heads),
        qkv,
        out,
        kv_cache,
        chunks.ends,
        chunks.lengths,
        chunks.tables,
        chunks.tile_chunks,
        chunks.tile_begins,
        scale * kv_scales[0] * LOG2_E,
        kv_scales[1],
        qkv.stride(0),
        out.stride(0),
        chunks.tables.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_heads,
        group=group,
        window=window or 0,
        block_size=block_size,
        size=size,
        block_m=block_m,
        block_n=tile_tokens(size, kv_cache.element_size()),
        block_d=padded(size),
        tile_rows=PREFILL_TILE,
        num_warps=NUM_WARPS,
        num_stages=PREFILL_STAGES,
        enable_fp_fusion=True,
    )


def prefill_rows(size: int) -> int:
    """Queries of a program. Depends on the model alone."""
    return min(PREFILL_ROWS, MAX_PREFILL_VALUES // padded(size))
