"""Attention of a prefill chunk over its sequence's block table (PagedAttention, Kwon et al. 2023) in Triton.

Invariant: a query's tiles of keys do not depend on where its chunk begins or ends, nor does its result.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.attention_tile import LOG2_E, NUM_WARPS, attend, padded, tile_tokens

PREFILL_ROWS = 32
"""Queries of a tile, every head of a group counted. From 64 on the probabilities would be a register operand of wgmma,
which gave NaN in other engines' kernels."""
MAX_PREFILL_VALUES = 32 * 256
"""Sums of a prefill tile, 64 a thread: with more, registers spill."""
PREFILL_STAGES = 5
"""A tile's address comes from the block table, whose load takes stages too: 2n + 1 of them keep n tiles in flight."""


@triton.jit(do_not_specialize=["chunk", "length"])  # type: ignore[untyped-decorator]
def prefill_kernel(  # type: ignore[no-untyped-def]
    qkv,
    out,
    kv_cache,
    table,
    scale,
    value_scale,  # of a cache of 8 bits
    query_stride,
    out_stride,
    block_stride,
    token_stride,
    kv_heads,
    chunk,
    length,
    group: tl.constexpr,
    window: tl.constexpr,
    block_size: tl.constexpr,
    size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    """`block_m` pairs of a token and one of the query heads of one KV head, tokens first."""
    kv_head = tl.program_id(1)
    # The last tokens see the most keys, so they start first.
    pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_m
    pairs = pair + tl.arange(0, block_m)
    token = pairs // group
    before = length - chunk
    end = before + tl.minimum((pair + block_m - 1) // group, chunk - 1) + 1
    begin = pair * 0
    if window > 0:
        # Tiles start at the same keys wherever the chunk starts.
        begin = tl.maximum(before + pair // group - window + 1, 0) // block_n * block_n
    columns = tl.arange(0, block_d)
    mask = (token < chunk)[:, None] & (columns < size)[None, :]
    place = (kv_head * group + pairs % group)[:, None] * size + columns[None, :]
    row = token.to(tl.int64)[:, None]
    total, weight, _ = attend(
        tl.load(qkv + row * query_stride + place, mask=mask, other=0.0),
        before + token,
        kv_cache + kv_head * size,
        kv_heads * size,
        table,
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
    tl.store(out + row * out_stride + place, result.to(out.dtype.element_ty), mask=mask)


def prefill_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """See `reference.prefill_attention`."""
    chunk = qkv.shape[0]
    _, block_size, _, kv_heads, size = kv_cache.shape
    group = out.shape[1] // size // kv_heads
    block_m = prefill_rows(size)
    prefill_kernel[triton.cdiv(chunk * group, block_m), kv_heads](
        qkv,
        out,
        kv_cache,
        block_table,
        scale * kv_scales[0] * LOG2_E,
        kv_scales[1],
        qkv.stride(0),
        out.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_heads,
        chunk,
        length,
        group=group,
        window=window or 0,
        block_size=block_size,
        size=size,
        block_m=block_m,
        block_n=tile_tokens(size, kv_cache.element_size()),
        block_d=padded(size),
        num_warps=NUM_WARPS,
        num_stages=PREFILL_STAGES,
        enable_fp_fusion=True,
    )


def prefill_rows(size: int) -> int:
    """Queries of a prefill tile. Depends on the model alone."""
    return min(PREFILL_ROWS, MAX_PREFILL_VALUES // padded(size))
