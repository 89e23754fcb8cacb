"""Decode attention over block tables (PagedAttention, Kwon et al. 2023) in Triton, its keys split (Flash-Decoding, Dao
2023) and merged by the program that ends last.

Invariant: a row's own length alone decides where its keys are split, and partial sums are merged in one fixed order, so a
row's result does not depend on its batch. Which program computes a split or merges does depend on it, without effect.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.attention_tile import LOG2_E, NUM_WARPS, attend, padded, tile_tokens
from loraplex.engine.kernels.triton.launch_plans import launch_kernel

SPLIT_TOKENS = 128
"""Fewest keys of a split: 64 KiB of K and V at 128 wide heads in bf16. Shorter rows are not split."""
FEW_SPLITS = 8
"""Splits of a row whose splits grow with it, from `SPLIT_TOKENS` to `LONG_SPLIT_TOKENS` keys. A lone row of 1,024 tokens has
64 with 8 KV heads, which half of an H100's SMs compute; partial sums of 8 cost 6 % of the bytes of a batch."""
LONG_SPLIT_TOKENS = 512
"""Keys of a split of a long row, whose partial sums are 1.5 % of the bytes."""
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
MERGE_VALUES = 2048
"""Partial sums that a program merges at once, 16 a thread."""
MAX_REGISTERS = {1: 168, 2: 128}
"""Of a thread, by the bytes of a cached value: what lets 3 programs share an SM, or 4. Wider heads than `WIDE_HEAD` and
float32 take what they need. Left alone, the compiler takes 205 with 8 bits, and 2 programs are left."""
WIDE_HEAD = 128
DECODE_STAGES = 7
"""A tile's address comes from the block table, and that load takes stages too: 2n + 1 of them keep n tiles in flight."""


@triton.jit  # type: ignore[untyped-decorator]
def splits_of(  # type: ignore[no-untyped-def]
    length,
    window: tl.constexpr,
    block_n: tl.constexpr,
    split_tokens: tl.constexpr,
    few_splits: tl.constexpr,
    long_tokens: tl.constexpr,
    max_splits: tl.constexpr,
):
    """First visible key of a row of `length` tokens, keys of each of its splits, and their number."""
    first = length * 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    visible = length - first
    share = tl.maximum(tl.minimum(tl.cdiv(visible, few_splits), long_tokens), tl.cdiv(visible, max_splits))
    tokens = tl.maximum(tl.cdiv(share, block_n) * block_n, split_tokens)
    return first, tokens, tl.cdiv(visible, tokens)


@triton.jit  # type: ignore[untyped-decorator]
def merge_splits(  # type: ignore[no-untyped-def]
    partials,
    weights,
    part,  # of the row's first split
    row_splits,
    heads,  # of the model
    first_head,
    group,  # heads from `first_head` on
    size: tl.constexpr,
    block_h: tl.constexpr,
    block_d: tl.constexpr,
    block_s: tl.constexpr,
):
    """Weighted mean of the sums of all splits, [block_h, block_d]: `block_s` at a time, in their order."""
    member = tl.arange(0, block_h)
    columns = tl.arange(0, block_d)
    total = tl.zeros((block_h, block_d), dtype=tl.float32)
    weight = tl.zeros((block_h,), dtype=tl.float32)
    greatest = tl.full((block_h,), -3.0e38, dtype=tl.float32)
    for begin in tl.range(0, row_splits, block_s, num_stages=1):
        split = begin + tl.arange(0, block_s)
        mask = (split < row_splits)[:, None] & (member < group)[None, :]
        cells = (part + split)[:, None] * heads + (first_head + member)[None, :]
        # Past the first cache: other programs wrote these.
        score = tl.load(weights + cells * 2 + 1, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part_weight = tl.load(weights + cells * 2, mask=mask, other=0.0, cache_modifier=".cg")
        sums = tl.load(
            partials + cells[:, :, None] * size + columns[None, None, :],
            mask=mask[:, :, None] & (columns < size)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(greatest, tl.max(score, 0))
        share = tl.exp2(score - higher[None, :])
        shrink = tl.exp2(greatest - higher)
        total = total * shrink[:, None] + tl.sum(sums * share[:, :, None], 0)
        weight = weight * shrink + tl.sum(part_weight * share, 0)
        greatest = higher
    return total / weight[:, None]


@triton.jit(do_not_specialize=["rows", "table_stride", "splits"])  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    qkv,
    out,
    kv_cache,  # [blocks, block_size, 2, kv_heads, size]
    tables,
    lengths,
    partials,  # [rows, splits, heads, size] fp32, not normalised
    weights,  # [rows, splits, heads, 2] fp32: sum of the weights, greatest score
    arrivals,  # [rows * tiles of heads]: splits that have ended, 0 before and after a launch
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
    block_h: tl.constexpr,
    block_s: tl.constexpr,
    split_tokens: tl.constexpr,
    few_splits: tl.constexpr,
    long_tokens: tl.constexpr,
    max_splits: tl.constexpr,
) -> None:
    """Compute every n-th split of all rows, for `block_m` query heads of one KV head each (the first, second, ... group).

    The grid may have any size, because it cannot depend on the lengths: each program counts the splits before its own.
    """
    head_tiles: tl.constexpr = (group + block_m - 1) // block_m
    every = tl.arange(0, block_rows)
    all_lengths = tl.load(lengths + every, mask=every < rows, other=0)
    _, _, counts = splits_of(all_lengths, window, block_n, split_tokens, few_splits, long_tokens, max_splits)
    ends = tl.cumsum(counts, 0)
    tiles = kv_heads * head_tiles
    for item in range(tl.program_id(0), tl.max(ends, 0) * tiles, tl.num_programs(0)):
        is_before = ends <= item // tiles
        row = tl.sum(is_before.to(tl.int32), 0)
        split = item // tiles - tl.max(tl.where(is_before, ends, 0), 0)
        length = tl.load(lengths + row)
        first, tokens, row_splits = splits_of(
            length, window, block_n, split_tokens, few_splits, long_tokens, max_splits
        )
        kv_head = item % tiles // head_tiles
        first_member = item % head_tiles * block_m
        member = first_member + tl.arange(0, block_m)
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
            heads = kv_heads * group
            part = (wide_row * splits + split) * heads
            tl.store(partials + part * size + place, total, mask=mask)
            tl.store(weights + (part + head) * 2, weight, mask=member < group)
            tl.store(weights + (part + head) * 2 + 1, greatest, mask=member < group)
            # Every thread's sums are written before one thread of this program says so, and that releases them.
            tl.debug_barrier()
            arrival = arrivals + row * tiles + item % tiles
            if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == row_splits - 1:
                tl.store(arrival, 0)
                first_head = kv_head * group + first_member
                merged = merge_splits(
                    partials,
                    weights,
                    wide_row * splits,
                    row_splits,
                    heads,
                    first_head,
                    group - first_member,
                    size,
                    block_h,
                    block_d,
                    block_s,
                )
                h = tl.arange(0, block_h)
                target = out + wide_row * out_stride + (first_head + h)[:, None] * size + columns[None, :]
                is_value = (first_member + h < group)[:, None] & (columns < size)[None, :]
                tl.store(target, merged.to(out.dtype.element_ty), mask=is_value)


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
    No length may need more columns than that shape has. Launches on one device must follow one another.
    """
    rows, columns = block_tables.shape
    _, block_size, _, kv_heads, size = kv_cache.shape
    heads = out.shape[1] // size
    group = heads // kv_heads
    tiles = kv_heads * triton.cdiv(group, DECODE_ROWS)
    splits = most_splits(columns * block_size, window)
    kept = (rows, splits, heads) if splits > 1 else (0, 0, 0)
    block_d, block_h = padded(size), min(DECODE_ROWS, triton.next_power_of_2(group))
    launch_kernel(
        decode_kernel,
        (min(rows * splits * tiles, MAX_PROGRAMS),),
        qkv,
        out,
        kv_cache,
        block_tables,
        lengths,
        torch.empty(*kept, size, dtype=torch.float32, device=out.device),
        torch.empty(*kept, 2, dtype=torch.float32, device=out.device),
        _arrivals(triton.next_power_of_2(rows * tiles), out.device),
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
        window=window or 0,
        block_size=block_size,
        size=size,
        block_m=DECODE_ROWS,
        block_n=tile_tokens(size, kv_cache.element_size()),
        block_d=block_d,
        block_rows=compiled_rows(rows),
        block_h=block_h,
        block_s=min(MAX_SPLITS, max(1, MERGE_VALUES // (block_h * block_d))),
        split_tokens=SPLIT_TOKENS,
        few_splits=FEW_SPLITS,
        long_tokens=LONG_SPLIT_TOKENS,
        max_splits=MAX_SPLITS,
        num_warps=NUM_WARPS,
        num_stages=DECODE_STAGES,
        maxnreg=max_registers(size, kv_cache.element_size()),
        enable_fp_fusion=True,
    )


def most_splits(tokens: int, window: int | None) -> int:
    """Return the most splits of a row whose block table has room for `tokens`."""
    visible = min(tokens, window or tokens)
    few = min(triton.cdiv(visible, SPLIT_TOKENS), FEW_SPLITS)
    long = min(triton.cdiv(visible, LONG_SPLIT_TOKENS), MAX_SPLITS)
    return int(max(few, long))


def compiled_rows(rows: int) -> int:
    """Return the number of rows that the kernel is compiled for."""
    power: int = triton.next_power_of_2(rows)
    return max(MIN_ROWS, power)


def max_registers(size: int, element_bytes: int) -> int | None:
    """Return the registers of a thread; None for what it needs. Depends on the model alone."""
    return MAX_REGISTERS.get(element_bytes) if size <= WIDE_HEAD else None


@cache
def _arrivals(count: int, device: torch.device) -> torch.Tensor:
    """Return counters that are 0 between launches. They stay at their address, as captured graphs expect."""
    return torch.zeros(count, dtype=torch.int32, device=device)
