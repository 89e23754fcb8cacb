"""Attention over block tables (PagedAttention, Kwon et al. 2023) in Triton, its keys split for decodes (Flash-Decoding, Dao 2023).

Invariant: where a row's keys are cut depends on its own length alone and partial sums are merged in one fixed order,
so a row's result does not depend on who shares its batch, nor a prompt's on where its chunks end.
"""

import math

import torch
import triton
import triton.language as tl

SPLIT_TOKENS = 512
"""Keys of a decode program, at the least: 256 KiB of K and V at 128 wide heads in bf16. Shorter rows need no merge."""
MAX_SPLITS = 32
"""With 8 KV heads 256 programs for one row, two for each SM of an H100; longer rows get longer splits instead."""
TILE_BYTES = 8 << 10
"""Bytes of K that a program loads at a time, and of V: a decode holds 3 of each, 48 KiB, so that 4 programs share an SM."""
MIN_TILE_TOKENS, MAX_TILE_TOKENS = 16, 64
"""The least K of a bf16 product; and no more for small heads, whose scores would fill the registers."""
DECODE_ROWS = 16
"""Query heads of a tile: the least a tensor core takes, and as many as one KV head has in most models."""
PREFILL_ROWS = 32
"""Queries of a tile, every head of a group counted. From 64 on the probabilities would be a register operand of wgmma,
which gave NaN in other engines' kernels."""
MAX_PREFILL_VALUES = 32 * 256
"""Sums of a prefill tile, 64 a thread: with more, registers spill."""
NUM_WARPS = 4
DECODE_STAGES, PREFILL_STAGES = 7, 5
"""A tile's address comes from the block table, whose load takes stages too: 2n + 1 of them keep n tiles in flight."""
LOG2_E = 1 / math.log(2)


@triton.jit  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    q,  # [rows, block_d]
    positions,  # [rows]: place of each query in the sequence; only with `causal`
    kv,  # K of token 0 of block 0 of this KV head
    to_value,  # from a token's K to its V
    table,
    begin,
    end,
    block_stride,
    token_stride,
    scale,  # of the scores, times log2 e
    causal: tl.constexpr,
    window: tl.constexpr,
    block_size: tl.constexpr,
    size: tl.constexpr,
    rows: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """Online softmax over keys begin..end: fp32 sums of weighted values, their weights, and the greatest score (base 2)."""
    columns = tl.arange(0, block_d)
    total = tl.zeros((rows, block_d), dtype=tl.float32)
    weight = tl.zeros((rows,), dtype=tl.float32)
    # Finite, so that a tile without a visible key weighs exp2(-inf - greatest) = 0 and never -inf - -inf.
    greatest = tl.full((rows,), -3.0e38, dtype=tl.float32)
    for start in range(begin, end, block_n):
        keys = start + tl.arange(0, block_n)
        within = keys < end
        blocks = tl.load(table + keys // block_size, mask=within, other=0).to(tl.int64)
        places = kv + blocks * block_stride + (keys % block_size) * token_stride
        cells = places[:, None] + columns[None, :]
        mask = within[:, None] & (columns < size)[None, :]
        k = tl.load(cells, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = within[None, :]
        if causal:
            visible &= keys[None, :] <= positions[:, None]
            if window > 0:
                visible &= keys[None, :] > positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(greatest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(greatest - higher)
        weight = weight * shrink + tl.sum(p, 1)
        v = tl.load(cells + to_value, mask=mask, other=0.0)
        total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
        greatest = higher
    return total, weight, greatest


@triton.jit  # type: ignore[untyped-decorator]
def splits_of(  # type: ignore[no-untyped-def]
    length,
    window: tl.constexpr,
    split_tokens: tl.constexpr,
    max_splits: tl.constexpr,
    block_n: tl.constexpr,
):
    """First visible key of a row of `length` tokens, keys of each of its splits, and their number, at least 1."""
    first = length * 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, max_splits), block_n) * block_n
    tokens = tl.maximum(share, split_tokens)
    return first, tokens, tl.cdiv(length - first, tokens)


@triton.jit(do_not_specialize=["table_stride", "splits"])  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    qkv,
    out,
    kv_cache,  # [blocks, block_size, 2, kv_heads, size]
    tables,
    lengths,
    partials,  # [rows, splits, heads, size] fp32, not normalised
    weights,  # [rows, splits, heads, 2] fp32: sum of the weights, greatest score
    scale,
    query_stride,
    out_stride,
    table_stride,
    block_stride,
    token_stride,
    kv_heads,
    splits,
    group: tl.constexpr,
    window: tl.constexpr,
    block_size: tl.constexpr,
    size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    split_tokens: tl.constexpr,
    max_splits: tl.constexpr,
) -> None:
    """One split of one row for the query heads of one KV head (the first, second, ... `block_m` of them)."""
    head_tiles: tl.constexpr = (group + block_m - 1) // block_m
    kv_head = tl.program_id(0) // head_tiles
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    first, tokens, row_splits = splits_of(length, window, split_tokens, max_splits, block_n)
    if split >= row_splits:
        return
    member = tl.program_id(0) % head_tiles * block_m + tl.arange(0, block_m)
    head = kv_head * group + member
    columns = tl.arange(0, block_d)
    mask = (member < group)[:, None] & (columns < size)[None, :]
    place = head[:, None] * size + columns[None, :]
    begin = first + split * tokens
    total, weight, greatest = attend(
        tl.load(qkv + row * query_stride + place, mask=mask, other=0.0),
        head,
        kv_cache + kv_head * size,
        kv_heads * size,
        tables + row * table_stride,
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
    if row_splits == 1:
        result = total / weight[:, None]
        tl.store(out + row * out_stride + place, result.to(out.dtype.element_ty), mask=mask)
    else:
        heads = kv_heads * group
        part = (row * splits + split) * heads
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
    """One head of one row; a tile of `max_splits` partials whatever their number, so that their order is always the same."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, row_splits = splits_of(tl.load(lengths + row), window, split_tokens, max_splits, block_n)
    if row_splits == 1:
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


@triton.jit(do_not_specialize=["chunk", "length"])  # type: ignore[untyped-decorator]
def prefill_kernel(  # type: ignore[no-untyped-def]
    qkv,
    out,
    kv_cache,
    table,
    scale,
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
    # The last tokens see the most keys: they start first.
    pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_m
    pairs = pair + tl.arange(0, block_m)
    token = pairs // group
    before = length - chunk
    end = before + tl.minimum((pair + block_m - 1) // group, chunk - 1) + 1
    begin = pair * 0
    if window > 0:
        # Tiles start at the same keys wherever the chunk does.
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
    result = total / weight[:, None]
    tl.store(out + row * out_stride + place, result.to(out.dtype.element_ty), mask=mask)


def decode_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    """See `reference.decode_attention`; every length is at least 1, and the places of a token's K and V are contiguous.

    Asks for nothing that is on the device: the grid follows from the shapes, and programs behind a row's end return.
    """
    rows, columns = block_tables.shape
    _, block_size, _, kv_heads, size = kv_cache.shape
    heads = out.shape[1] // size
    visible = min(columns * block_size, window or columns * block_size)
    splits = min(triton.cdiv(visible, SPLIT_TOKENS), MAX_SPLITS)
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
    decode_kernel[kv_heads * triton.cdiv(group, DECODE_ROWS), splits, rows](
        qkv,
        out,
        kv_cache,
        block_tables,
        lengths,
        partials,
        weights,
        scale * LOG2_E,
        qkv.stride(0),
        out.stride(0),
        block_tables.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_heads,
        splits,
        group=group,
        block_size=block_size,
        block_m=DECODE_ROWS,
        num_warps=NUM_WARPS,
        num_stages=DECODE_STAGES,
        **cut,
    )
    if splits > 1:
        merge_kernel[heads, rows](
            out, lengths, partials, weights, out.stride(0), heads, splits, num_warps=NUM_WARPS, **cut
        )


def prefill_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    scale: float,
    window: int | None,
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
        scale * LOG2_E,
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


def padded(size: int) -> int:
    """Columns of a tile for heads of `size`: a power of two that a tensor core takes."""
    power: int = triton.next_power_of_2(size)
    return max(16, power)


def tile_tokens(size: int, element_bytes: int) -> int:
    """Keys of a tile: `TILE_BYTES` of K, within what a program can hold. Depends on the model alone."""
    return min(max(TILE_BYTES // (padded(size) * element_bytes), MIN_TILE_TOKENS), MAX_TILE_TOKENS)


def prefill_rows(size: int) -> int:
    """Queries of a prefill tile. Depends on the model alone."""
    return min(PREFILL_ROWS, MAX_PREFILL_VALUES // padded(size))
