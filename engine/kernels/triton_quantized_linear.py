"""Weight-only quantized products in Triton: integers become exact floats in registers, scales meet the fp32 sums.

Invariant: at decode nothing is rounded but y, once; no atomics, and the order of a sum depends on shape and tile alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.engine.quantization.groups import span_of
from loraplex.engine.quantization.weight import QuantizedWeight, WeightFormat

INT8_SPAN = 128
"""Inputs of a tile of int8: a line of 128 bytes of an output; a group when groups are shorter."""
ASSEMBLY = True
"""Whether bytes are taken apart by PTX or by arithmetic, which costs half as many instructions again; both are exact."""

_NIBBLES_TO_BF16 = tl.constexpr("""
{
    .reg .b32 upper;
    shr.u32 upper, $4, 4;
    prmt.b32 $0, $4, 0x43434343, 0x4140;
    prmt.b32 $1, $4, 0x43434343, 0x4342;
    prmt.b32 $2, upper, 0x43434343, 0x4140;
    prmt.b32 $3, upper, 0x43434343, 0x4342;
    and.b32 $0, $0, 0xFF0FFF0F;
    and.b32 $1, $1, 0xFF0FFF0F;
    and.b32 $2, $2, 0xFF0FFF0F;
    and.b32 $3, $3, 0xFF0FFF0F;
}
""")
"""Four bytes to 128 + low nibble and 128 + high nibble: a nibble is the mantissa's end under the exponent of 128."""

_BYTES_ABOVE_2_23 = tl.constexpr("""
{
    .reg .b32 raised;
    xor.b32 raised, $4, 0x80808080;
    prmt.b32 $0, raised, 0x4B000000, 0x7650;
    prmt.b32 $1, raised, 0x4B000000, 0x7651;
    prmt.b32 $2, raised, 0x4B000000, 0x7652;
    prmt.b32 $3, raised, 0x4B000000, 0x7653;
}
""")
"""Four int8 to 2**23 + 128 + each as fp32."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program cuts the product. `spans` tiles of K go side by side, one per warp, and are summed at the end."""

    block_m: int
    block_n: int
    spans: int
    num_warps: int
    num_stages: int


SKINNY_TILES = (Tile(16, 32, 4, 4, 4), Tile(16, 64, 4, 4, 4), Tile(32, 32, 4, 4, 4))
"""Up to 32 rows, on HMMA: K is shared out among the warps, for 4096 outputs alone are too few for 132 SMs."""
WIDE_TILES = (Tile(64, 64, 1, 4, 4), Tile(128, 128, 1, 8, 3))
"""Prefill, on wgmma with both operands in shared memory."""
FLOAT32_TILE = Tile(16, 32, 4, 4, 1)
"""For whom exactness is everything: without tensor cores there are no registers for loads that run ahead."""
_MANY_OUTPUTS = 64 * 132 * 2
"""From so many outputs on a tile of 64 leaves every SM of an H200 two programs."""


def tile_for(x: torch.Tensor, weight: QuantizedWeight) -> Tile:
    """The tile of a product: by its rows, and for decode by whether the outputs fill the device."""
    rows = x.shape[0]
    few, many, more_rows = SKINNY_TILES
    if x.dtype is torch.float32:
        return FLOAT32_TILE
    # Zeros take the registers that the larger ones of these tiles need.
    is_symmetric = weight.zeros is None
    if rows <= few.block_m:
        return many if is_symmetric and weight.outputs >= _MANY_OUTPUTS else few
    if rows <= more_rows.block_m and is_symmetric:
        return more_rows
    return WIDE_TILES[rows > WIDE_TILES[0].block_m]


@triton.jit  # type: ignore[untyped-decorator]
def nibbles_to_floats(stored, dtype: tl.constexpr, assembly: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes to the integers of their low and of their high nibbles, each less 8, exactly."""
    if dtype == tl.bfloat16:
        if assembly:
            low, high = tl.inline_asm_elementwise(
                _NIBBLES_TO_BF16,
                "=&r,=&r,=&r,=&r,r",
                [stored],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:
            low = ((stored.to(tl.int16) & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
            high = ((stored.to(tl.int16) >> 4) | 0x4300).to(tl.bfloat16, bitcast=True)
        return low - 136.0, high - 136.0
    elif dtype == tl.float16:
        low = ((stored.to(tl.int16) & 15) | 0x6400).to(tl.float16, bitcast=True)
        high = ((stored.to(tl.int16) >> 4) | 0x6400).to(tl.float16, bitcast=True)
        return low - 1032.0, high - 1032.0
    else:
        return (stored & 15).to(dtype) - 8.0, (stored >> 4).to(dtype) - 8.0


@triton.jit  # type: ignore[untyped-decorator]
def byte_to_float(stored, dtype: tl.constexpr, assembly: tl.constexpr):  # type: ignore[no-untyped-def]
    """An int8, exactly: placed in the mantissa of 2**23, since a converting instruction has a quarter of the rate."""
    if assembly:
        raised = tl.inline_asm_elementwise(
            _BYTES_ABOVE_2_23, "=&r,=&r,=&r,=&r,r", [stored], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        raised = (((stored.to(tl.int32) & 255) ^ 128) | 0x4B000000).to(tl.float32, bitcast=True)
    return (raised - 8388736.0).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def group_parameters(scales, zeros, group, groups, outputs, column, has_zeros: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale and zero - 8 of a group, in fp32; those of the last one for groups beyond it, where x is 0."""
    at = tl.minimum(group, groups - 1).to(tl.int64) * outputs + column
    scale = tl.load(scales + at).to(tl.float32)
    return scale, (tl.load(zeros + at).to(tl.float32) - 8.0) if has_zeros else scale


@triton.jit  # type: ignore[untyped-decorator]
def add_int4(  # type: ignore[no-untyped-def]
    total,
    x_low,
    x_high,
    stored,
    low_group,
    high_group,
    groups_per_span: tl.constexpr,
    has_zeros: tl.constexpr,
    assembly: tl.constexpr,
):
    """total + the product with one tile of K. The groups' scales and zeros meet the sums, not the weights."""
    low, high = nibbles_to_floats(stored, x_low.dtype, assembly)
    low_scale, low_zero = low_group
    high_scale, high_zero = high_group
    low_part = tl.dot(x_low, low, input_precision="ieee")
    if groups_per_span == 1:
        low_part = tl.dot(x_high, high, low_part, input_precision="ieee")
        if has_zeros:
            x_sum = x_low.to(tl.float32) + x_high.to(tl.float32)
            low_part -= tl.sum(x_sum, axis=len(x_low.shape) - 1, keep_dims=True) * low_zero
        total += low_part * low_scale
    else:
        high_part = tl.dot(x_high, high, input_precision="ieee")
        if has_zeros:
            low_part -= tl.sum(x_low.to(tl.float32), axis=len(x_low.shape) - 1, keep_dims=True) * low_zero
            high_part -= tl.sum(x_high.to(tl.float32), axis=len(x_low.shape) - 1, keep_dims=True) * high_zero
        total += low_part * low_scale + high_part * high_scale
    return total


@triton.jit  # type: ignore[untyped-decorator]
def add_int8(  # type: ignore[no-untyped-def]
    total, x, stored, group, groups_per_span: tl.constexpr, assembly: tl.constexpr
):
    """total + the product with one tile of K; scaled where the tile is a group."""
    w = byte_to_float(stored, x.dtype, assembly)
    if groups_per_span == 0:
        return tl.dot(x, w, total, input_precision="ieee")
    else:
        return total + tl.dot(x, w, input_precision="ieee") * group[0]


@triton.jit  # type: ignore[untyped-decorator]
def skinny_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, inputs]
    packed,
    scales,  # [groups, outputs]
    zeros,
    bias,  # [outputs]
    y,  # [rows, outputs]
    rows,
    inputs,
    outputs,
    tiles,
    groups,
    tile_stride,
    output_stride,
    bits: tl.constexpr,
    span: tl.constexpr,
    groups_per_span: tl.constexpr,  # 0: one scale per output
    has_zeros: tl.constexpr,
    has_bias: tl.constexpr,
    assembly: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    spans: tl.constexpr,
) -> None:
    """`block_n` outputs of one row tile; `spans` tiles of K in every turn."""
    width: tl.constexpr = span * bits // 8
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    # Outputs and tiles beyond the last read the last one: cheaper than a mask on every weight. x is 0 there.
    column = tl.minimum(columns, outputs - 1)[None, None, :]
    members = tl.program_id(0) * block_m + tl.arange(0, block_m)
    is_member = (members < rows)[None, :, None]
    x_rows = x + tl.minimum(members, rows - 1).to(tl.int64)[None, :, None] * inputs
    weights = packed + column.to(tl.int64) * output_stride
    within = tl.arange(0, width)
    place = tl.arange(0, spans)[:, None, None]
    total = tl.zeros((spans, block_m, block_n), dtype=tl.float32)
    low = group_parameters(scales, zeros, place * groups_per_span, groups, outputs, column, has_zeros)
    high = low
    if groups_per_span == 2:
        high = group_parameters(scales, zeros, place * 2 + 1, groups, outputs, column, has_zeros)
    for first in range(0, tiles, spans):
        # One turn ahead: nothing else hides the way of a scale from memory.
        group = (place + first + spans) * groups_per_span
        next_low = low
        next_high = high
        if groups_per_span > 0:
            next_low = group_parameters(scales, zeros, group, groups, outputs, column, has_zeros)
        if groups_per_span == 2:
            next_high = group_parameters(scales, zeros, group + 1, groups, outputs, column, has_zeros)
        tile = tl.minimum(place + first, tiles - 1)
        address = weights + tile.to(tl.int64) * tile_stride + within[None, :, None]
        k = (place + first) * span + within[None, None, :]
        x_low = tl.load(x_rows + k, mask=is_member & (k < inputs), other=0.0)
        if bits == 8:
            stored = tl.load(address, mask=tile * span + within[None, :, None] < inputs, other=0)
            total = add_int8(total, x_low, stored, low, groups_per_span, assembly)
        else:
            x_high = tl.load(x_rows + k + width, mask=is_member & (k + width < inputs), other=0.0)
            stored = tl.load(address)
            total = add_int4(total, x_low, x_high, stored, low, high, groups_per_span, has_zeros, assembly)
        low = next_low
        high = next_high
    if groups_per_span == 0:
        total *= low[0]
    result = tl.sum(total, axis=0)
    if has_bias:
        result += tl.load(bias + tl.minimum(columns, outputs - 1)).to(tl.float32)[None, :]
    target = y + members.to(tl.int64)[:, None] * outputs + columns[None, :]
    is_inside = (members < rows)[:, None] & (columns < outputs)[None, :]
    tl.store(target, result.to(y.dtype.element_ty), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def scaled(w, scales, zeros, group, groups, outputs, column, has_zeros: tl.constexpr):  # type: ignore[no-untyped-def]
    """Integers [k, n] of one group to its weights, in their own dtype."""
    scale, zero = group_parameters(scales, zeros, group, groups, outputs, column, has_zeros)
    if has_zeros:
        w -= zero.to(w.dtype)
    if w.dtype == tl.bfloat16:
        w *= scale.to(tl.bfloat16)
    else:
        # A scale may be too small for fp16 where the weight is not.
        w = (w.to(tl.float32) * scale).to(w.dtype)
    return w


@triton.jit  # type: ignore[untyped-decorator]
def wide_kernel(  # type: ignore[no-untyped-def]
    x,
    packed,
    scales,
    zeros,
    bias,
    y,
    rows,
    inputs,
    outputs,
    tiles,
    groups,
    tile_stride,
    output_stride,
    bits: tl.constexpr,
    span: tl.constexpr,
    groups_per_span: tl.constexpr,
    has_zeros: tl.constexpr,
    has_bias: tl.constexpr,
    assembly: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    """One tile of y, one tile of K in every turn. The arguments are `skinny_kernel`'s.

    Groups' scales are put into the weights here, rounded to x's dtype as any weight is: the sums stay in the tensor
    cores' registers, and a group costs a row of scales instead of a pass over the sums.
    """
    width: tl.constexpr = span * bits // 8
    dtype: tl.constexpr = x.dtype.element_ty
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    column = tl.minimum(columns, outputs - 1)[None, :]
    members = tl.program_id(0) * block_m + tl.arange(0, block_m)
    is_member = (members < rows)[:, None]
    x_rows = x + tl.minimum(members, rows - 1).to(tl.int64)[:, None] * inputs
    within = tl.arange(0, width)
    weights = packed + column.to(tl.int64) * output_stride + within[:, None]
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for tile in range(tiles):
        address = weights + tl.cast(tile, tl.int64) * tile_stride
        k = tile * span + within[None, :]
        x_low = tl.load(x_rows + k, mask=is_member & (k < inputs), other=0.0)
        group = tile * groups_per_span
        if bits == 8:
            w = byte_to_float(
                tl.load(address, mask=tile * span + within[:, None] < inputs, other=0), dtype, assembly
            )
            if groups_per_span > 0:
                w = scaled(w, scales, zeros, group, groups, outputs, column, False)
            total = tl.dot(x_low, w, total, input_precision="ieee")
        else:
            x_high = tl.load(x_rows + k + width, mask=is_member & (k + width < inputs), other=0.0)
            low, high = nibbles_to_floats(tl.load(address), dtype, assembly)
            low = scaled(low, scales, zeros, group, groups, outputs, column, has_zeros)
            high_group = group + groups_per_span - 1
            high = scaled(high, scales, zeros, high_group, groups, outputs, column, has_zeros)
            total = tl.dot(x_low, low, total, input_precision="ieee")
            total = tl.dot(x_high, high, total, input_precision="ieee")
    if groups_per_span == 0:
        total *= tl.load(scales + column).to(tl.float32)
    if has_bias:
        total += tl.load(bias + column).to(tl.float32)
    target = y + members.to(tl.int64)[:, None] * outputs + columns[None, :]
    tl.store(target, total.to(dtype), mask=is_member & (columns < outputs)[None, :])


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """See `reference.quantized_linear`; sums are fp32, `out` is rounded once."""
    launch(x, weight, out, tile_for(x, weight), bias)


def launch(
    x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor, tile: Tile, bias: torch.Tensor | None = None
) -> None:
    """`quantized_linear` with a tile of the caller's choice."""
    span = span_for(weight)
    is_int8 = weight.format is WeightFormat.INT8
    tiles = triton.cdiv(weight.inputs, span)
    grid = triton.cdiv(x.shape[0], tile.block_m), triton.cdiv(weight.outputs, tile.block_n)
    kernel, side_by_side = (skinny_kernel, {"spans": tile.spans}) if tile.spans > 1 else (wide_kernel, {})
    kernel[grid](
        x,
        weight.packed,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out if bias is None else bias,
        out,
        x.shape[0],
        weight.inputs,
        weight.outputs,
        tiles,
        weight.scales.shape[0],
        span if is_int8 else weight.outputs * (span // 2),
        weight.inputs if is_int8 else span // 2,
        bits=8 if is_int8 else 4,
        span=span,
        groups_per_span=0 if is_int8 and weight.is_per_channel else span // weight.group_size,
        has_zeros=weight.zeros is not None,
        has_bias=bias is not None,
        assembly=ASSEMBLY and x.is_cuda,
        block_m=tile.block_m,
        block_n=tile.block_n,
        enable_fp_fusion=True,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **side_by_side,
    )


def span_for(weight: QuantizedWeight) -> int:
    """Inputs of a tile of K."""
    if weight.format is WeightFormat.INT4:
        return span_of(weight.group_size)
    return INT8_SPAN if weight.is_per_channel else min(INT8_SPAN, weight.group_size)
