"""y = x W^T + b with W in 8 or 4 bits: rows become integers of 16 bits, sums of bytes are exact, scales come last.

Invariant: a row's result is a function of the row and the weight alone. Integer sums have no order; the float operations
behind them are few and fixed (`byte_tile`).
"""

import threading
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from loraplex.engine.kernels.compiled.byte_tile import has_byte_products, multiply_tile
from loraplex.engine.kernels.compiled.machine import (
    FLOAT32,
    KINDS,
    ParallelBody,
    barrier,
    bits_of,
    float_of,
    load,
    load_float,
    round_to_int,
    store,
    store_byte,
    store_float,
    store_int,
    thread_number,
    width,
)
from loraplex.engine.quantization.byte_lines import LANES, inputs_of_line
from loraplex.engine.quantization.weight import QuantizedWeight

DIGITS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 3}
"""Bytes of a value of x. Two keep more than bfloat16 has, of all but a row's smallest values; three, float32."""
WIDE = 3
"""Blocks of 16 outputs in a tile: with four rows of two digits, 24 of 32 vector registers hold sums."""
MAX_TILE_ROWS = 4
LONG_PRODUCT = 8 << 20
"""From so many multiplications on, some 0.2 ms, other threads of Python may run meanwhile."""
_INFINITY_BITS = 0x7F800000
_SMALLEST_BITS = 0x0DA24260
"""1e-30: a row whose largest value is below it is zeros; its inverse would overflow."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def _largest_bits(kind: int, source: int, size: int) -> Any:
    """The bits of the largest magnitude: NaN and infinity are larger than any number."""
    largest = np.int32(_SMALLEST_BITS)
    for k in range(size):
        largest = max(largest, bits_of(load(kind, source, k)) & np.int32(0x7FFFFFFF))
    return largest


@njit(inline="always")  # type: ignore[untyped-decorator]
def _store_digits(
    kind: int,
    digits: int,
    source: int,
    inverse: Any,
    target: int,
    row_bytes: int,
    begin: int,
    end: int,
    offsets: int,
) -> None:
    """Integers of one group as signed bytes, and each byte's sum, negated."""
    high, middle, low = np.int32(0), np.int32(0), np.int32(0)
    for k in range(begin, end):
        number = round_to_int(load(kind, source, k) * inverse)
        upper = (number + np.int32(128)) >> np.int32(8)
        last = number - (upper << np.int32(8))
        store_byte(target + (digits - 1) * row_bytes, k, last)
        low -= last
        if digits == 3:
            first = (upper + np.int32(128)) >> np.int32(8)
            second = upper - (first << np.int32(8))
            store_byte(target, k, first)
            store_byte(target + row_bytes, k, second)
            high -= first
            middle -= second
        elif digits == 2:
            store_byte(target, k, upper)
            high -= upper
    store_int(offsets, digits - 1, low)
    if digits >= 2:
        store_int(offsets, 0, high)
    if digits == 3:
        store_int(offsets, 1, middle)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _store_outputs(
    kind: int,
    sums: int,
    rows: int,
    blocks: int,
    scales: int,
    y: int,
    bias: int,
    row: int,
    block: int,
    outputs: int,
) -> None:
    """The sums [rows, blocks, 16] of a tile to y, scaled by the row and rounded once."""
    first, stride = block * LANES, blocks * LANES
    count = min(stride, outputs - first)
    for r in range(rows):
        scale = load_float(scales, row + r)
        source = sums + r * stride * 4
        target = y + ((row + r) * outputs + first) * width(kind)
        if bias != 0:
            added = bias + first * width(kind)
            for n in range(count):
                store(kind, target, n, load_float(source, n) * scale + load(kind, added, n))
        else:
            for n in range(count):
                store(kind, target, n, load_float(source, n) * scale)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _round_rows(
    kind: int,
    digits: int,
    x: int,
    rows: int,
    inputs: int,
    target: Any,
    groups: int,
    group_inputs: int,
    thread: int,
    threads: int,
) -> None:
    """This thread's rows to `digits` bytes a value. target: addresses of digits, offsets and row scales, row bytes."""
    integers, offsets, row_scales, row_bytes = target
    largest_integer = np.float32(127 << 8 * (digits - 1))
    for row in range(thread, rows, threads):
        source, run = x + row * inputs * width(kind), integers + row * digits * row_bytes
        largest = _largest_bits(kind, source, inputs)
        inverse, scale, used = np.float32(0), np.float32(np.nan), np.int64(0)
        if largest < np.int32(_INFINITY_BITS):
            inverse, scale = largest_integer / float_of(largest), float_of(largest) / largest_integer
            used = np.int64(inputs)
        store_float(row_scales, row, scale)
        for d in range(digits):
            for k in range(used, row_bytes):
                store_byte(run + d * row_bytes, k, np.int32(0))
        for g in range(groups):
            begin, place = g * group_inputs, offsets + (row * groups + g) * digits * 4
            end = min(used, begin + group_inputs)
            _store_digits(kind, digits, source, inverse, run, row_bytes, begin, end, place)


@cache
def _body(kind: int, bits: int, has_zeros: bool, bf16_scales: bool, by_instruction: bool) -> ParallelBody:
    digits = 3 if kind == FLOAT32 else 2
    tall = 8 // digits  # 4 or 2 rows
    half = tall // 2
    scale_bytes = LANES * (2 if bf16_scales else 4)
    per_line = inputs_of_line(bits)

    def multiply_rows(block: Any) -> None:
        arguments = carray(block, (18,))
        threads, rows, inputs, outputs = arguments[0], arguments[1], arguments[2], arguments[3]
        x, y, bias = arguments[4], arguments[5], arguments[6]
        weights, scales, zeros = arguments[7], arguments[8], arguments[9]
        lines, group_lines, groups = arguments[10], arguments[11], arguments[12]
        integers, offsets, row_scales, sums = arguments[13], arguments[14], arguments[15], arguments[16]
        thread, row_bytes = np.int64(thread_number()), lines * per_line
        target = (integers, offsets, row_scales, row_bytes)
        _round_rows(kind, digits, x, rows, inputs, target, groups, group_lines * per_line, thread, threads)
        barrier()

        blocks = (outputs + LANES - 1) // LANES
        own = sums + thread * arguments[17]
        at, end = blocks * thread // threads, blocks * (thread + 1) // threads
        while at < end:
            w = weights + at * lines * 64
            s, z = scales + at * groups * scale_bytes, zeros + at * groups * LANES
            taken = np.int64(WIDE) if end - at >= WIDE else np.int64(1)
            # The next tile comes into the cache in equal parts while this one is multiplied.
            ahead, stride = w + taken * lines * 64, taken * 64 // ((rows + tall - 1) // tall)
            row = np.int64(0)
            while row < rows:
                run, offset = integers + row * digits * row_bytes, offsets + row * groups * digits * 4
                operands = (w, lines, group_lines, groups, run, row_bytes, offset, s, z, own, ahead, stride)
                left = rows - row
                count = np.int64(tall) if left >= tall else np.int64(half) if left >= half else np.int64(1)
                if taken == 1:
                    count = np.int64(tall) if left >= tall else np.int64(1)
                    if count == tall:
                        multiply_tile(tall, 1, digits, bits, has_zeros, bf16_scales, by_instruction, operands)
                    else:
                        multiply_tile(1, 1, digits, bits, has_zeros, bf16_scales, by_instruction, operands)
                elif count == tall:
                    multiply_tile(tall, WIDE, digits, bits, has_zeros, bf16_scales, by_instruction, operands)
                elif count == half:
                    multiply_tile(half, WIDE, digits, bits, has_zeros, bf16_scales, by_instruction, operands)
                else:
                    multiply_tile(1, WIDE, digits, bits, has_zeros, bf16_scales, by_instruction, operands)
                _store_outputs(kind, own, count, taken, row_scales, y, bias, row, at, outputs)
                row += count
                ahead += stride * lines
            at += taken

    return ParallelBody(multiply_rows, 18, as_written=True)


class Workspace(threading.local):
    """Buffers of a calling thread's parallel region, grown as needed and reused by all products of a step."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.int8)
        self._floats = torch.empty(0)

    def reserve(self, digits: int, numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """At least so many bytes, and so many numbers of four bytes."""
        if self._bytes.numel() < digits:
            self._bytes = torch.empty(digits, dtype=torch.int8)
        if self._floats.numel() < numbers:
            self._floats = torch.empty(numbers)
        return self._bytes, self._floats


@cache
def _workspace() -> Workspace:
    return Workspace()


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """See `reference.quantized_linear`. x contiguous, `weight` in lines."""
    threads, rows = torch.get_num_threads(), x.shape[0]
    digits, groups, lines = DIGITS[x.dtype], weight.groups, weight.packed.shape[1]
    per_line = inputs_of_line(weight.bits)
    tile_numbers = MAX_TILE_ROWS * WIDE * LANES
    run_bytes, run_numbers = rows * digits * lines * per_line, rows * groups * digits
    integers, numbers = _workspace().reserve(run_bytes, run_numbers + rows + threads * tile_numbers)
    at = numbers.data_ptr()
    body = _body(
        KINDS[x.dtype],
        weight.bits,
        weight.zeros is not None,
        weight.scales.dtype is torch.bfloat16,
        has_byte_products(),
    )
    body(
        threads,
        rows,
        weight.inputs,
        weight.outputs,
        x.data_ptr(),
        out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        weight.packed.data_ptr(),
        weight.scales.data_ptr(),
        0 if weight.zeros is None else weight.zeros.data_ptr(),
        lines,
        lines if groups == 1 else weight.group_size // per_line,
        groups,
        integers.data_ptr(),
        at,
        at + run_numbers * 4,
        at + (run_numbers + rows) * 4,
        tile_numbers * 4,
        releases_gil=rows * weight.inputs * weight.outputs >= LONG_PRODUCT,
    )
