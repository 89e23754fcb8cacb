"""Per-head norm, rotary embedding (Su et al. 2021) and the KV write in Triton: one program per token and some of its heads.

Invariant: the thread that writes a pair (i, i + half) also reads it, so that q and k change in place without a race.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.launch_plans import launch_kernel
from loraplex.engine.kernels.triton.rms_norm import inverse_rms

TILE_VALUES = 1024
"""Values of a program: two loads of 16 bytes a thread; 6 programs for a token of Llama 3 8B."""
NUM_WARPS = 2


@triton.jit
def rotated(first, second, cos, sin):  # type: ignore[no-untyped-def]
    """Rotate pairs by their angles, all fp32."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def square_sums(values):  # type: ignore[no-untyped-def]
    """Return the sum of squares of each row of a tile."""
    return tl.sum(values * values, 1)


@triton.jit
def norm_weights(q_norm, k_norm, columns, end, is_query):  # type: ignore[no-untyped-def]
    """The weights of `columns` [1, n] before `end` for each head of a tile, fp32 [heads, n]."""
    within = columns < end
    query = tl.load(q_norm + columns, mask=within, other=0.0)
    return tl.where(is_query, query, tl.load(k_norm + columns, mask=within, other=0.0)).to(tl.float32)


@triton.jit
def e4m3_bits(values):  # type: ignore[no-untyped-def]
    """fp32 to the bits of float8_e4m3fn: to the nearest, ties to even, at most 448; NaN and infinity become NaN.

    In arithmetic, since the interpreter's conversion neither rounds nor saturates as the instruction does.
    """
    size = tl.minimum(tl.abs(values), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # The exponent's bias goes from 127 to 7, the mantissa from 23 bits to 3.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 in steps of 2^-9, which is the last place of 2^14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(tl.abs(values) < float("inf"), code, 0x7F)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def store_part(  # type: ignore[no-untyped-def]
    values,  # fp32 [heads, columns] as they were loaded
    result,  # fp32, the same of q and k after norm and rotation
    place,
    cell,
    within,
    is_value,
    is_cached,
    inverse_scale,
    written: tl.constexpr,
    quantized: tl.constexpr,
) -> None:
    """Write q and k back to their places if they changed; write k and v to the cache, in its type."""
    if written:
        tl.store(place, result.to(place.dtype.element_ty), mask=within & ~is_value)
    # Cached values were rounded to the model's type before.
    kept = tl.where(is_value, values, result).to(place.dtype.element_ty)
    if quantized:
        tl.store(cell, e4m3_bits(kept.to(tl.float32) * inverse_scale), mask=within & is_cached)
    else:
        tl.store(cell, kept.to(cell.dtype.element_ty), mask=within & is_cached)


@triton.jit  # type: ignore[untyped-decorator]
def rotary_kernel(  # type: ignore[no-untyped-def]
    qkv,  # [tokens, (heads + 2 kv_heads) * size]
    kv_cache,  # [slots, 2, kv_heads, size]; of bytes if `quantized`
    positions,
    slots,
    cos,  # [positions, half] fp32; only with half > 0
    sin,
    q_norm,  # [size]; only with `normed`
    k_norm,
    row_stride,
    token_stride,
    heads,
    kv_heads,
    epsilon,
    key_inverse,
    value_inverse,
    half: tl.constexpr,
    size: tl.constexpr,
    normed: tl.constexpr,
    quantized: tl.constexpr,
    block_h: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
) -> None:
    """Process heads of token `program_id(0)` in three parts: first halves of pairs, second halves, and unrotated
    components.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_h + tl.arange(0, block_h)[:, None]
    is_head = head < heads + 2 * kv_heads
    is_query, is_value = head < heads, head >= heads + kv_heads
    slot = tl.load(slots + token)
    is_cached = ~is_query & (slot >= 0)
    inverse = tl.where(is_value, value_inverse, key_inverse)
    place = qkv + token * row_stride + head * size
    cell = kv_cache + slot * token_stride + (head - heads) * size
    dtype: tl.constexpr = qkv.dtype.element_ty
    pair = tl.arange(0, block_half)[None, :]
    is_pair = is_head & (pair < half)
    rest = 2 * half + tl.arange(0, block_rest)[None, :]
    is_rest = is_head & (rest < size)
    if half > 0:
        first = tl.load(place + pair, mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(place + half + pair, mask=is_pair, other=0.0).to(tl.float32)
        new_first, new_second = first, second
    if 2 * half < size:
        third = tl.load(place + rest, mask=is_rest, other=0.0).to(tl.float32)
        new_third = third
    if normed:
        total = tl.zeros((block_h,), dtype=tl.float32)
        if half > 0:
            total += square_sums(first) + square_sums(second)
        if 2 * half < size:
            total += square_sums(third)
        scale = inverse_rms(total, size, epsilon)[:, None]
        if half > 0:
            new_first *= scale * norm_weights(q_norm, k_norm, pair, half, is_query)
            new_second *= scale * norm_weights(q_norm, k_norm, half + pair, 2 * half, is_query)
            new_first, new_second = new_first.to(dtype).to(tl.float32), new_second.to(dtype).to(tl.float32)
        if 2 * half < size:
            new_third *= scale * norm_weights(q_norm, k_norm, rest, size, is_query)
    if half > 0:
        angle = tl.load(positions + token) * half + pair
        is_angle = pair < half
        cosines = tl.load(cos + angle, mask=is_angle, other=0.0)
        sines = tl.load(sin + angle, mask=is_angle, other=0.0)
        new_first, new_second = rotated(new_first, new_second, cosines, sines)
        store_part(
            first,
            new_first,
            place + pair,
            cell + pair,
            is_pair,
            is_value,
            is_cached,
            inverse,
            True,
            quantized,
        )
        store_part(
            second,
            new_second,
            place + half + pair,
            cell + half + pair,
            is_pair,
            is_value,
            is_cached,
            inverse,
            True,
            quantized,
        )
    if 2 * half < size:
        store_part(
            third,
            new_third,
            place + rest,
            cell + rest,
            is_rest,
            is_value,
            is_cached,
            inverse,
            normed,
            quantized,
        )


def rotary_write_kv(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """See `reference.rotary_write_kv`. A token whose slot is below 0, which pads a graph, is not written to the cache."""
    tokens, columns = qkv.shape
    kv_heads, size = kv_cache.shape[3], kv_cache.shape[4]
    half = 0 if rope is None else rope[0].shape[1]
    quantized = kv_cache.dtype is torch.float8_e4m3fn
    block_h = heads_of_tile(size)
    launch_kernel(
        rotary_kernel,
        (tokens, triton.cdiv(columns // size, block_h)),
        qkv,
        kv_cache.view(torch.uint8) if quantized else kv_cache,
        positions,
        slots,
        *(rope or (qkv, qkv)),
        *(norms or (qkv, qkv)),
        qkv.stride(0),
        kv_cache.stride(1),
        columns // size - 2 * kv_heads,
        kv_heads,
        epsilon,
        1 / kv_scales[0],
        1 / kv_scales[1],
        half=half,
        size=size,
        normed=norms is not None,
        quantized=quantized,
        block_h=block_h,
        block_half=triton.next_power_of_2(max(half, 1)),
        block_rest=triton.next_power_of_2(max(size - 2 * half, 1)),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def heads_of_tile(size: int) -> int:
    """Heads of a program, a power of two. Depends on the model alone."""
    heads: int = max(TILE_VALUES // triton.next_power_of_2(size), 1)
    return heads
