"""Decode attention over block tables (PagedAttention, Kwon et al. 2023) in Triton, its keys split (Flash-Decoding, Dao
2023).

Invariant: a row's own length alone decides where its keys are split, and partial sums are merged in one fixed order, so a
row's result does not depend on its batch. Which program computes a split does depend on it, without effect.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.attention_tile import LOG2_E, NUM_WARPS, attend, padded, tile_tokens

SPLIT_TOKENS = 512
"""Fewest keys of a split: 256 KiB of K and V at 128 wide heads in bf16. Shorter rows need no merge."""
MAX_SPLITS = 32
"""Most splits of a row. With 8 KV heads that is 256 splits for one row, two for each SM of an H100; longer rows get longer
splits instead."""
MAX_PROGRAMS = 1056
"""Two programs for each place on an H100 (132 SMs, 4 programs on each), so that one that ends early is followed by
another."""
DECODE_ROWS = 16
"""Query heads of a tile: the fewest a tensor core takes, and as many as one KV head has in most models."""
MIN_ROWS = 64
"""Fewest rows that a kernel is compiled for: smaller batches share one variant."""
DECODE_STAGES = 7
"""A tile's address comes from the block table, and that load takes stages too: 2n + 1 of them keep n tiles in flight."""


@triton.jit  # type: ignore[untyped-decorator]
def splits_of(  # type: ignore[no-untyped-def]
    length,
    window: tl.constexpr,
    split_tokens: tl.constexpr,
    max_splits: tl.constexpr,
    block_n: tl.constexpr,
):
    """First visible key of a row of `length` tokens, keys of each of its splits, and their number."""
    first = length * 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, max_splits), block_n) * block_n
    tokens = tl.maximum(share, split_tokens)
    return first, tokens, tl.cdiv(length - first, tokens)


@triton.jit(do_not_specialize=["rows", "table_stride", "splits"])  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    qkv,
    out,
    kv_cache,  # [blocks, block_size, 2, kv_heads, size]
    tables,
    lengths,
    partials,  # [rows, splits, heads, size] fp32, not normalised
    weights,  # [rows, splits, heads, 2] fp32: sum of the weights, greatest score
    scale,
    value_scale,  # of a cache of 8 bits
    query_stride,
    out_stride,
    table_stride,
    block_stride,
    token_stride,
    kv_heads,
    rows,
    splits,
    group: tl.constexpr,
    window: tl.constexpr,
    block_size: tl.constexpr,
    size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_rows: tl.constexpr,
    split_tokens: tl.constexpr,
    max_splits: tl.constexpr,
) -> None:
    """Compute every n-th split of all rows, for `block_m` query heads of one KV head each (the first, second, ... group).

    The grid may have any size, because it cannot depend on the lengths: each program counts the splits before its own.
    """
    head_tiles: tl.constexpr = (group + block_m - 1) // block_m
    every = tl.arange(0, block_rows)
    _, _, counts = splits_of(
        tl.load(lengths + every, mask=every < rows, other=0), window, split_tokens, max_splits, block_n
    )
    ends = tl.cumsum(tl.where(every < rows, counts, 0), 0)
    tiles = kv_heads * head_tiles
    for item in range(tl.program_id(0), tl.max(ends, 0) * tiles, tl.num_programs(0)):
        is_before = ends <= item // tiles
        row = tl.sum(is_before.to(tl.int32), 0)
        split = item // tiles - tl.max(tl.where(is_before, ends, 0), 0)
        length = tl.load(lengths + row)
        first, tokens, row_splits = splits_of(length, window, split_tokens, max_splits, block_n)
        kv_head = item % tiles // head_tiles
        member = item % head_tiles * block_m + tl.arange(0, block_m)
        head = kv_head * group + member
        columns = tl.arange(0, block_d)
        mask = (member < group)[:, None] & (columns < size)[None, :]
        place = head[:, None] * size + columns[None, :]
        begin = first + split * tokens
        wide_row = row.to(tl.int64)
        total, weight, greatest = attend(
            tl.load(qkv + wide_row * query_stride + place, mask=mask, other=0.0),
            head,
            kv_cache + kv_head * size,
            kv_heads * size,
            tables + wide_row * table_stride,
            begin,
            tl.minimum(begin + tokens, length),
            block_stride,
            token_stride,
            scale,
            False,
            0,
            block_size,
            size,
            block_m,
            block_n,
            block_d,
        )
        total *= value_scale
        if row_splits == 1:
            result = (total / weight[:, None]).to(out.dtype.element_ty)
            tl.store(out + wide_row * out_stride + place, result, mask=mask)
        else:
            part = (wide_row * splits + split) * kv_heads * group
            tl.store(partials + part * size + place, total, mask=mask)
            tl.store(weights + (part + head) * 2, weight, mask=member < group)
            tl.store(weights + (part + head) * 2 + 1, greatest, mask=member < group)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    out,
    lengths,
    partials,
    weights,
    out_stride,
    heads,
    splits,
    window: tl.constexpr,
    size: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    split_tokens: tl.constexpr,
    max_splits: tl.constexpr,
) -> None:
    """Merge one head of one row. The tile always has `max_splits` partials, so that their order is always the same."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, row_splits = splits_of(tl.load(lengths + row), window, split_tokens, max_splits, block_n)
    if row_splits <= 1:
        return
    split = tl.arange(0, max_splits)
    is_split = split < row_splits
    part = (row * splits + split) * heads + head
    greatest = tl.load(weights + part * 2 + 1, mask=is_split, other=float("-inf"))
    share = tl.exp2(greatest - tl.max(greatest, 0))
    weight = tl.sum(share * tl.load(weights + part * 2, mask=is_split, other=0.0), 0)
    columns = tl.arange(0, block_d)
    mask = is_split[:, None] & (columns < size)[None, :]
    partial = tl.load(partials + part[:, None] * size + columns[None, :], mask=mask, other=0.0)
    result = tl.sum(partial * share[:, None], 0) / weight
    place = out + row * out_stride + head * size + columns
    tl.store(place, result.to(out.dtype.element_ty), mask=columns < size)


def decode_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """See `reference.decode_attention`; the places of a token's K and V are contiguous.

    Reads no value back from the device, so that a graph can capture it: the grid follows from the shape of `block_tables`.
    No length may need more columns than that shape has. A graph of short rows is captured with a narrow view of wide
    tables, and has no merge when that view covers no more than one split.
    """
    rows, columns = block_tables.shape
    _, block_size, _, kv_heads, size = kv_cache.shape
    heads = out.shape[1] // size
    splits = most_splits(columns * block_size, window)
    kept = (rows, splits, heads) if splits > 1 else (0, 0, 0)
    partials = torch.empty(*kept, size, dtype=torch.float32, device=out.device)
    weights = torch.empty(*kept, 2, dtype=torch.float32, device=out.device)
    cut = {
        "window": window or 0,
        "size": size,
        "block_n": tile_tokens(size, kv_cache.element_size()),
        "block_d": padded(size),
        "split_tokens": SPLIT_TOKENS,
        "max_splits": MAX_SPLITS,
        "enable_fp_fusion": True,
    }
    group = heads // kv_heads
    items = rows * splits * kv_heads * triton.cdiv(group, DECODE_ROWS)
    decode_kernel[(min(items, MAX_PROGRAMS),)](
        qkv,
        out,
        kv_cache,
        block_tables,
        lengths,
        partials,
        weights,
        scale * kv_scales[0] * LOG2_E,
        kv_scales[1],
        qkv.stride(0),
        out.stride(0),
        block_tables.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_heads,
        rows,
        splits,
        group=group,
        block_size=block_size,
        block_m=DECODE_ROWS,
        block_rows=compiled_rows(rows),
        num_warps=NUM_WARPS,
        num_stages=DECODE_STAGES,
        **cut,
    )
    if splits > 1:
        merge_kernel[heads, rows](
            out, lengths, partials, weights, out.stride(0), heads, splits, num_warps=NUM_WARPS, **cut
        )


def most_splits(tokens: int, window: int | None) -> int:
    """Return the most splits of a row whose block table has room for `tokens`."""
    splits: int = triton.cdiv(min(tokens, window or tokens), SPLIT_TOKENS)
    return min(splits, MAX_SPLITS)


def compiled_rows(rows: int) -> int:
    """Return the number of rows that the kernel is compiled for."""
    power: int = triton.next_power_of_2(rows)
    return max(MIN_ROWS, power)
