"""The loop that all Triton attention kernels share: an online softmax (Milakov & Gimelshein 2018) over a block table's
keys.

Invariant: tiles begin at the same keys in every batch, and depend on the model alone.
"""

import math

import triton
import triton.language as tl

TILE_BYTES = 8 << 10
"""Bytes of K, and of V, that a program loads at a time: a decode holds 3 of each, 48 KiB, so that 4 programs share an SM."""
MIN_TILE_TOKENS, MAX_TILE_TOKENS = 16, 64
"""The smallest K of a bf16 product. Small heads get no more: their scores would fill the registers. Keys of 8 bits take
half the registers, so twice as many share the work of a tile."""
NUM_WARPS = 4
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
    """fp32 sums of weighted values over keys begin..end, their weights, and the greatest score (base 2).

    A cache of 8 bits is multiplied in fp16, which holds its every value and takes fewer instructions than bf16; the
    scale then meets the query before it is rounded, so that it fits.
    """
    quantized: tl.constexpr = kv.dtype.element_ty == tl.float8e4nv
    if quantized:
        q = (q.to(tl.float32) * scale).to(tl.float16)
    columns = tl.arange(0, block_d)
    total = tl.zeros((rows, block_d), dtype=tl.float32)
    weight = tl.zeros((rows,), dtype=tl.float32)
    # Finite, so that a tile without a visible key has the weight exp2(-inf - greatest) = 0, never -inf - -inf.
    greatest = tl.full((rows,), -3.0e38, dtype=tl.float32)
    for start in range(begin, end, block_n):
        keys = start + tl.arange(0, block_n)
        within = keys < end
        blocks = tl.load(table + keys // block_size, mask=within, other=0).to(tl.int64)
        places = kv + blocks * block_stride + (keys % block_size) * token_stride
        cells = places[:, None] + columns[None, :]
        mask = within[:, None] & (columns < size)[None, :]
        k = tl.load(cells, mask=mask, other=0.0)
        if quantized:
            scores = tl.dot(q, tl.trans(k.to(tl.float16)))
        else:
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
        total *= shrink[:, None]
        if quantized:
            total = tl.dot(p.to(tl.float16), v.to(tl.float16), total)
        else:
            total = tl.dot(p.to(v.dtype), v, total, input_precision="ieee")
        greatest = higher
    return total, weight, greatest


def padded(size: int) -> int:
    """Columns of a tile for heads of `size`: a power of two that a tensor core takes."""
    power: int = triton.next_power_of_2(size)
    return max(16, power)


def tile_tokens(size: int, element_bytes: int) -> int:
    """Return the keys of a tile: `TILE_BYTES` of K, within a program's registers. Depends on the model alone."""
    most = MAX_TILE_TOKENS if element_bytes > 1 else 2 * MAX_TILE_TOKENS
    return min(max(TILE_BYTES // (padded(size) * element_bytes), MIN_TILE_TOKENS), most)
