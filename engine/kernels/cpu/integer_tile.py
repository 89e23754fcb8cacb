"""The two steps of an integer product as LLVM code: rounding a group of a row to int8, and a tile of rows times 16 outputs.

Invariant: integer sums are exact, and the float operations on them run in one order for every number of rows. A row is
stored as blocks of one group: negated int32 sum times the excess of the weights; float scale; 32 int8.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import Signature
from numba.extending import intrinsic

from loraplex.engine.kernels.cpu import llvm_vectors as code
from loraplex.engine.kernels.cpu.llvm_vectors import FLOAT, FLOATS, HALF, I16, I32, I64, INTS, LANES

GROUP = 32
"""Inputs of a row that share a scale. One scale per row is too coarse: one outlier among 576 inputs flattens all others."""
BLOCK_BYTES = GROUP + 8
LINE_BYTES = 64
"""Layout of a line: four inputs of 16 outputs in bytes, or eight in nibbles, the first four low, the others high."""
_LARGEST = 127.0
_SMALLEST = 2.0**-100
"""A group whose largest value is below this becomes zeros: its inverse would overflow."""

Codegen = Callable[[Any, Any, Any, Any], Any]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def round_group(
    typing_context: Any, is_bfloat16: Any, source: Any, excess: Any, block: Any
) -> tuple[Signature, Codegen]:
    """Round 32 numbers at `source`, float16 if not bfloat16, to one block. A non-finite number makes the scale non-finite."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_round(builder, bool(is_bfloat16.literal_value), *arguments[1:])
        return context.get_dummy_value()

    return types.void(is_bfloat16, types.int64, types.int64, types.int64), codegen


def _emit_round(builder: Any, is_bfloat16: bool, source: Any, excess: Any, block: Any) -> None:
    bits = code.load(builder, source, ir.VectorType(I16, GROUP), 2)
    magnitudes = builder.and_(bits, code.constant(bits.type, 0x7FFF))
    # As integers, infinity and NaN are larger than every number.
    largest = code.reduce(builder, "umax", magnitudes)
    if is_bfloat16:
        largest = builder.bitcast(builder.shl(builder.zext(largest, I32), I32(16)), FLOAT)
    else:
        largest = builder.fpext(builder.bitcast(largest, HALF), FLOAT)
    is_zero = builder.fcmp_ordered("<", largest, FLOAT(_SMALLEST))
    scale = builder.select(is_zero, FLOAT(0.0), builder.fdiv(largest, FLOAT(_LARGEST)))
    inverse = builder.select(is_zero, FLOAT(0.0), builder.fdiv(FLOAT(_LARGEST), largest))
    factors, integers = code.splat(builder, inverse), []
    for first in range(0, GROUP, LANES):
        lanes = ir.Constant(INTS, list(range(first, first + LANES)))
        part = builder.shuffle_vector(bits, bits, lanes)
        numbers = (
            code.widened_bfloat16(builder, part)
            if is_bfloat16
            else builder.fpext(builder.bitcast(part, ir.VectorType(HALF, LANES)), FLOATS)
        )
        rounded = code.nearest_integers(builder, builder.fmul(numbers, factors))
        integers.append(rounded)
        place = builder.add(block, I64(8 + first))
        code.store(builder, place, builder.trunc(rounded, ir.VectorType(code.I8, LANES)), 1)
    total = code.reduce(builder, "add", builder.add(*integers))
    code.store(builder, block, builder.neg(builder.mul(total, builder.trunc(excess, I32))), 4)
    code.store(builder, builder.add(block, I64(4)), scale, 4)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_tile(
    typing_context: Any,
    rows: Any,
    is_bfloat16: Any,
    has_nibbles: Any,
    has_zeros: Any,
    by_instruction: Any,
    blocks: Any,
    row_blocks: Any,
    weights: Any,
    ahead: Any,
    weight_groups: Any,
    groups: Any,
    out: Any,
    out_bytes: Any,
) -> tuple[Signature, Codegen]:
    """`rows` rows times 16 outputs, rounded once to `out`; the first five arguments are constants.

    blocks: the first row's, `row_blocks` bytes before the next row's. weights: float bias [16], then per weight group
    float scales [16], with zeros the bytes [16, 4] to add to every integer, and lines for `groups` blocks of a row.
    Lines `ahead` bytes further on are prefetched.
    """
    constants = (rows, is_bfloat16, has_nibbles, has_zeros, by_instruction)
    tile = _Tile(*(constant.literal_value for constant in constants))

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tile.emit(builder, *arguments[len(constants) :])
        return context.get_dummy_value()

    return types.void(*constants, *[types.int64] * 8), codegen


class _Tile:
    """Emits the code of one tile: weights are loaded once for all its rows."""

    def __init__(
        self, rows: int, is_bfloat16: int, has_nibbles: int, has_zeros: int, by_instruction: int
    ) -> None:
        self._rows = range(rows)
        self._is_bfloat16, self._by_instruction = bool(is_bfloat16), bool(by_instruction)
        self._has_nibbles, self._has_zeros = bool(has_nibbles), bool(has_zeros)
        self._lines = GROUP // (8 if has_nibbles else 4)

    def emit(
        self,
        builder: Any,
        blocks: Any,
        row_blocks: Any,
        weights: Any,
        ahead: Any,
        weight_groups: Any,
        groups: Any,
        out: Any,
        out_bytes: Any,
    ) -> None:
        bias = code.load(builder, weights, FLOATS, LINE_BYTES)
        totals = [cgutils.alloca_once(builder, FLOATS) for _ in self._rows]
        parts = [cgutils.alloca_once(builder, FLOATS) for _ in self._rows]
        for total in totals:
            builder.store(bias, total)
        line = cgutils.alloca_once(builder, I64)
        block = cgutils.alloca_once(builder, I64)
        builder.store(builder.add(weights, I64(LINE_BYTES)), line)
        builder.store(blocks, block)
        with code.repeated(builder, weight_groups):
            scales = code.load(builder, builder.load(line), FLOATS, LINE_BYTES)
            self._advance(builder, line, LINE_BYTES)
            added = None
            if self._has_zeros:
                added = code.load(builder, builder.load(line), code.BYTES, LINE_BYTES)
                self._advance(builder, line, LINE_BYTES)
            for part in parts:
                builder.store(code.constant(FLOATS, 0.0), part)
            with code.repeated(builder, groups):
                row = builder.load(block)
                self._multiply_group(builder, builder.load(line), ahead, added, row, row_blocks, parts)
                self._advance(builder, line, self._lines * LINE_BYTES)
                self._advance(builder, block, BLOCK_BYTES)
            for part, total in zip(parts, totals, strict=True):
                value = code.fused_multiply_add(builder, builder.load(part), scales, builder.load(total))
                builder.store(value, total)
        for row, total in enumerate(totals):
            place = builder.add(out, builder.mul(out_bytes, I64(row)))
            code.store(builder, place, self._narrowed(builder, builder.load(total)), 2)

    def _advance(self, builder: Any, variable: Any, count: int) -> None:
        builder.store(builder.add(builder.load(variable), I64(count)), variable)

    def _multiply_group(
        self, builder: Any, line: Any, ahead: Any, added: Any, block: Any, row_blocks: Any, parts: list[Any]
    ) -> None:
        rows = [builder.add(block, builder.mul(row_blocks, I64(row))) for row in self._rows]
        sums = [code.splat(builder, code.load(builder, row, I32, 4)) for row in rows]
        for index in range(self._lines):
            place = builder.add(line, I64(index * LINE_BYTES))
            code.prefetch(builder, builder.add(place, ahead))
            stored = code.load(builder, place, code.BYTES, LINE_BYTES)
            quads = self._quads(builder, stored, added)
            for position, quad in enumerate(quads):
                offset = 8 + 4 * (index * len(quads) + position)
                for row, address in enumerate(rows):
                    signed = code.load(builder, builder.add(address, I64(offset)), I32, 4)
                    sums[row] = code.byte_products(builder, sums[row], quad, signed, self._by_instruction)
        for row, address in enumerate(rows):
            scale = code.splat(builder, code.load(builder, builder.add(address, I64(4)), FLOAT, 4))
            number = builder.sitofp(sums[row], FLOATS)
            value = code.fused_multiply_add(builder, number, scale, builder.load(parts[row]))
            builder.store(value, parts[row])

    def _quads(self, builder: Any, stored: Any, added: Any) -> list[Any]:
        """The bytes of four inputs each, from one line."""
        if not self._has_nibbles:
            return [stored]
        low = code.constant(code.BYTES, 15)
        quads = [builder.and_(stored, low), builder.lshr(stored, code.constant(code.BYTES, 4))]
        return quads if added is None else [builder.add(quad, added) for quad in quads]

    def _narrowed(self, builder: Any, numbers: Any) -> Any:
        if self._is_bfloat16:
            return code.narrowed_bfloat16(builder, numbers)
        return builder.fptrunc(numbers, ir.VectorType(HALF, LANES))
