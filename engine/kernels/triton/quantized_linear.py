"""Weight-only quantized products in Triton: integers become exact floats in registers, scales are applied to the fp32 sums.

Invariant: at decode only y is rounded, once. The order of a sum depends on the weight's shape and the tile alone.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.quantized_linear_tiles import Tile, span_for, splits_for, tile_for
from loraplex.engine.kernels.triton.unpacking import byte_to_float, nibbles_to_floats, raised_zero
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat

MAX_SPLIT_TILES = 4096
"""Tiles of y that a split product may have: each has a counter."""
SUM_COLUMNS = tl.constexpr(8)
"""Equal columns of the sums of x: what the tensor cores' narrowest instruction computes."""
ASSEMBLY = True
"""Whether bytes are unpacked by PTX or by arithmetic, which costs half as many instructions again; both are exact."""


@triton.jit  # type: ignore[untyped-decorator]
def group_parameters(scales, zeros, group, groups, outputs, column, has_zeros: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale in fp32 and zero, 0..15, of a group; those of the last one for groups beyond it, where x is 0."""
    at = tl.minimum(group, groups - 1).to(tl.int64) * outputs + column
    scale = tl.load(scales + at).to(tl.float32)
    return scale, tl.load(zeros + at) if has_zeros else scale


@triton.jit
def sum_rows(x, total):  # type: ignore[no-untyped-def]
    """total [.., m, SUM_COLUMNS] + the sums of x's rows, equal in each column: the tensor cores have time for it, and their
    sums come to lie where those of the product are.
    """
    if x.dtype == tl.float32:
        total += tl.sum(x, axis=len(x.shape) - 1, keep_dims=True)
    else:
        ones = tl.full((x.shape[0], x.shape[2], SUM_COLUMNS), 1.0, x.dtype)
        total = tl.dot(x, ones, total)
    return total


@triton.jit
def lowered(part, x_sums, zero):  # type: ignore[no-untyped-def]
    """Subtract (zero - 8) times x's sums from the product of x with integers - 8."""
    x_sum = tl.sum(x_sums, axis=len(part.shape) - 1, keep_dims=True)
    return part - x_sum * ((zero.to(tl.float32) - 8.0) / SUM_COLUMNS)


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
    """total + the product with one tile of K. The groups' scales and zeros are applied to the sums, not to the weights."""
    low, high = nibbles_to_floats(stored, 8, 8, False, x_low.dtype, assembly)
    low_scale, low_zero = low_group
    high_scale, high_zero = high_group
    no_sums = tl.zeros((x_low.shape[0], x_low.shape[1], SUM_COLUMNS), dtype=tl.float32)
    low_part = tl.dot(x_low, low, input_precision="ieee")
    if groups_per_span == 1:
        low_part = tl.dot(x_high, high, low_part, input_precision="ieee")
        if has_zeros:
            low_part = lowered(low_part, sum_rows(x_high, sum_rows(x_low, no_sums)), low_zero)
        total += low_part * low_scale
    else:
        high_part = tl.dot(x_high, high, input_precision="ieee")
        if has_zeros:
            low_part = lowered(low_part, sum_rows(x_low, no_sums), low_zero)
            high_part = lowered(high_part, sum_rows(x_high, no_sums), high_zero)
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
def sum_of_splits(  # type: ignore[no-untyped-def]
    result, partials, counters, splits, block_m: tl.constexpr, block_n: tl.constexpr
):
    """Return (the sum over all splits in their order, whether this program has it): the last program to finish adds them
    up.
    """
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    place = tl.arange(0, block_m)[:, None] * block_n + tl.arange(0, block_n)[None, :]
    sums = partials + tile.to(tl.int64) * splits * (block_m * block_n)
    tl.store(sums + tl.program_id(2) * (block_m * block_n) + place, result)
    # Every thread writes its part before one of them counts it, and reads only after it has seen the full count.
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
    tl.debug_barrier()
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for split in range(tl.where(is_last, splits, 0)):
        total += tl.load(sums + split * (block_m * block_n) + place, cache_modifier=".cg")
    # Reset the counter for the next product.
    tl.store(counters + tile, 0, mask=is_last)
    return total, is_last


@triton.jit(do_not_specialize=["rows", "groups", "splits"])  # type: ignore[untyped-decorator]
def skinny_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, inputs]
    packed,
    scales,  # [groups, outputs]
    zeros,
    bias,  # [outputs]
    y,  # [rows, outputs]
    partials,  # float32 [tiles of y, splits, block_m, block_n]
    counters,  # int32 [tiles of y], zeros
    rows,
    inputs,
    outputs,
    tiles,
    groups,
    tile_stride,
    output_stride,
    splits,
    tiles_per_split,  # a multiple of `spans`
    bits: tl.constexpr,
    span: tl.constexpr,
    groups_per_span: tl.constexpr,  # 0: one scale per output
    has_zeros: tl.constexpr,
    has_bias: tl.constexpr,
    assembly: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    spans: tl.constexpr,
    is_split: tl.constexpr,
) -> None:
    """`block_n` outputs of one row tile over one split of K; `spans` tiles of K in every turn."""
    width: tl.constexpr = span * bits // 8
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    # Outputs and tiles beyond the last read the last one: cheaper than a mask on every weight. x is 0 there.
    column = tl.minimum(columns, outputs - 1)[None, None, :]
    members = tl.program_id(0) * block_m + tl.arange(0, block_m)
    is_member = (members < rows)[None, :, None]
    x_rows = x + tl.minimum(members, rows - 1).to(tl.int64)[None, :, None] * inputs
    weights = packed + column.to(tl.int64) * output_stride
    within = tl.arange(0, width)
    begin = tl.program_id(2) * tiles_per_split if is_split else 0
    end = tl.minimum(begin + tiles_per_split, tiles) if is_split else tiles
    place = tl.arange(0, spans)[:, None, None] + begin
    total = tl.zeros((spans, block_m, block_n), dtype=tl.float32)
    low = group_parameters(scales, zeros, place * groups_per_span, groups, outputs, column, has_zeros)
    high = low
    if groups_per_span == 2:
        high = group_parameters(scales, zeros, place * 2 + 1, groups, outputs, column, has_zeros)
    for first in range(0, end - begin, spans):
        # Load one iteration ahead: nothing else hides the latency of a scale.
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
    is_inside = (members < rows)[:, None] & (columns < outputs)[None, :]
    if is_split:
        result, is_last = sum_of_splits(result, partials, counters, splits, block_m, block_n)
        is_inside &= is_last
    if has_bias:
        result += tl.load(bias + tl.minimum(columns, outputs - 1)).to(tl.float32)[None, :]
    target = y + members.to(tl.int64)[:, None] * outputs + columns[None, :]
    tl.store(target, result.to(y.dtype.element_ty), mask=is_inside)


@triton.jit
def scaled(w, scale):  # type: ignore[no-untyped-def]
    """Multiply integers [k, n] by their scales [1, n] in fp32, in their own dtype."""
    if w.dtype == tl.bfloat16:
        w *= scale.to(tl.bfloat16)
    else:
        # A scale may be too small for fp16 where the weight is not.
        w = (w.to(tl.float32) * scale).to(w.dtype)
    return w


@triton.jit(do_not_specialize=["rows", "groups", "splits"])  # type: ignore[untyped-decorator]
def wide_kernel(  # type: ignore[no-untyped-def]
    x,
    packed,
    scales,
    zeros,
    bias,
    y,
    partials,
    counters,
    rows,
    inputs,
    outputs,
    tiles,
    groups,
    tile_stride,
    output_stride,
    splits,
    tiles_per_split,
    bits: tl.constexpr,
    span: tl.constexpr,
    groups_per_span: tl.constexpr,
    has_zeros: tl.constexpr,
    has_bias: tl.constexpr,
    assembly: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    is_split: tl.constexpr,
) -> None:
    """One tile of y over one split of K, one tile of K per iteration. The arguments are `skinny_kernel`'s.

    Groups' scales are multiplied into the weights here, rounded to x's dtype as any weight is. So the sums stay in the
    tensor cores' registers, and a group costs a row of scales instead of a pass over the sums.
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
    begin = tl.program_id(2) * tiles_per_split if is_split else 0
    end = tl.minimum(begin + tiles_per_split, tiles) if is_split else tiles
    for tile in range(begin, end):
        address = weights + tl.cast(tile, tl.int64) * tile_stride
        k = tile * span + within[None, :]
        x_low = tl.load(x_rows + k, mask=is_member & (k < inputs), other=0.0)
        group = tile * groups_per_span
        if bits == 8:
            w = byte_to_float(
                tl.load(address, mask=tile * span + within[:, None] < inputs, other=0), dtype, assembly
            )
            if groups_per_span > 0:
                w = scaled(w, group_parameters(scales, zeros, group, groups, outputs, column, False)[0])
            total = tl.dot(x_low, w, total, input_precision="ieee")
        else:
            x_high = tl.load(x_rows + k + width, mask=is_member & (k + width < inputs), other=0.0)
            low_scale, low_zero = group_parameters(scales, zeros, group, groups, outputs, column, has_zeros)
            low_zero = raised_zero(low_zero, dtype)
            high_scale, high_zero = low_scale, low_zero
            if groups_per_span == 2:
                high_scale, high_zero = group_parameters(
                    scales, zeros, group + 1, groups, outputs, column, has_zeros
                )
                high_zero = raised_zero(high_zero, dtype)
            low, high = nibbles_to_floats(tl.load(address), low_zero, high_zero, has_zeros, dtype, assembly)
            low = scaled(low, low_scale)
            high = scaled(high, high_scale)
            total = tl.dot(x_low, low, total, input_precision="ieee")
            total = tl.dot(x_high, high, total, input_precision="ieee")
    if groups_per_span == 0:
        total *= tl.load(scales + column).to(tl.float32)
    is_inside = is_member & (columns < outputs)[None, :]
    if is_split:
        total, is_last = sum_of_splits(total, partials, counters, splits, block_m, block_n)
        is_inside &= is_last
    if has_bias:
        total += tl.load(bias + column).to(tl.float32)
    target = y + members.to(tl.int64)[:, None] * outputs + columns[None, :]
    tl.store(target, total.to(dtype), mask=is_inside)


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """See `reference.quantized_linear`; sums are fp32, `out` is rounded once."""
    launch(x, weight, out, tile_for(x, weight), bias)


def launch(
    x: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor,
    tile: Tile,
    bias: torch.Tensor | None = None,
    splits: int | None = None,
) -> None:
    """`quantized_linear` with a given tile; `splits` of K default to those for the weight's shape."""
    span = span_for(weight)
    is_int8 = weight.format is WeightFormat.INT8
    tiles = triton.cdiv(weight.inputs, span)
    grid = triton.cdiv(x.shape[0], tile.block_m), triton.cdiv(weight.outputs, tile.block_n)
    operands = {
        "x": x,
        "packed": weight.packed,
        "scales": weight.scales,
        "zeros": weight.scales if weight.zeros is None else weight.zeros,
        "bias": out if bias is None else bias,
        "y": out,
        "rows": x.shape[0],
        "inputs": weight.inputs,
        "outputs": weight.outputs,
        "tiles": tiles,
        "groups": weight.scales.shape[0],
        "tile_stride": span if is_int8 else weight.outputs * (span // 2),
        "output_stride": weight.inputs if is_int8 else span // 2,
    }
    constants = {
        "bits": weight.bits,
        "span": span,
        "groups_per_span": 0 if is_int8 and weight.is_per_channel else span // weight.group_size,
        "has_zeros": weight.zeros is not None,
        "has_bias": bias is not None,
        "assembly": ASSEMBLY and x.is_cuda,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "enable_fp_fusion": True,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    wanted = splits_for(x.shape[0], weight, tile) if splits is None else splits
    tiles_per_split = triton.cdiv(triton.cdiv(tiles, wanted), tile.spans) * tile.spans
    splits = triton.cdiv(tiles, tiles_per_split)
    partials, counters = _split_buffers(x, math.prod(grid), splits, tile)
    operands |= {
        "splits": splits,
        "tiles_per_split": tiles_per_split,
        "partials": partials,
        "counters": counters,
    }
    constants["is_split"] = splits > 1
    kernel = skinny_kernel if tile.spans > 1 else wide_kernel
    if tile.spans > 1:
        constants["spans"] = tile.spans
    kernel[(*grid, splits)](**operands, **constants)


def _split_buffers(
    x: torch.Tensor, tiles_of_y: int, splits: int, tile: Tile
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return partial sums and counters; arbitrary tensors where nothing is split."""
    if splits == 1:
        return x, x
    if tiles_of_y > MAX_SPLIT_TILES:
        raise ValueError(f"{tiles_of_y} tiles of y; a split product has at most {MAX_SPLIT_TILES}")
    size = tiles_of_y * splits * tile.block_m * tile.block_n
    return x.new_empty(size, dtype=torch.float32), _counters(x.device)


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Return counters that are zero before and after every product, for the one stream that products run on."""
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)
