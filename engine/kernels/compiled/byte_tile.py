"""One register tile of an integer product, as LLVM code: rows in bytes times weights in 8 or 4 bits, 16 outputs a vector.

Invariant: integer sums are exact and the float operations behind them are the same for every tile, in one order, so
that a result does not depend on the tile that computed it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import Signature
from numba.extending import intrinsic

from loraplex.engine.quantization.byte_lines import LANES

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_BYTES, _SHORTS, _INTS = ir.VectorType(_I8, 64), ir.VectorType(_I16, 32), ir.VectorType(_I32, LANES)
_FLOATS, _HALVES = ir.VectorType(_FLOAT, LANES), ir.VectorType(_I16, LANES)
_FLOAT_BYTES = LANES * 4


@cache
def has_byte_products() -> bool:
    """Whether this CPU multiplies and sums four bytes per lane in one instruction (AVX-512 VNNI)."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))


def _splat(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    lanes = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), lanes)


def _constant(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


def _offset(builder: Any, base: Any, index: Any, stride: int, constant: int = 0) -> Any:
    return builder.add(builder.add(base, _I64(constant)), builder.mul(index, _I64(stride)))


def _load(builder: Any, address: Any, element: ir.Type) -> Any:
    value = builder.load(builder.inttoptr(address, element.as_pointer()))
    value.align = 4 if element is _I32 else 1
    return value


def _function(builder: Any, name: str, vector: ir.VectorType) -> Any:
    """LLVM's function of three vectors with one of the same type for result."""
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(vector, [vector] * 3), name)


def _prefetch(builder: Any) -> Any:
    name, nothing = "llvm.prefetch.p0", ir.VoidType()
    kind = ir.FunctionType(nothing, [_I8.as_pointer(), _I32, _I32, _I32])
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def _add_by_instruction(builder: Any, total: Any, weights: Any, row: Any) -> Any:
    arguments = [total, builder.bitcast(weights, _INTS), row]
    return builder.call(_function(builder, "llvm.x86.avx512.vpdpbusd.512", _INTS), arguments)


def _add_by_arithmetic(builder: Any, total: Any, weights: Any, row: Any) -> Any:
    """The same sums in what every CPU has: products of 16 bits, added in pairs."""
    eight, wide = _constant(_SHORTS, 8), ir.VectorType(_I32, 32)
    w, x = builder.bitcast(weights, _SHORTS), builder.bitcast(row, _SHORTS)
    pairs = (
        (builder.and_(w, _constant(_SHORTS, 255)), builder.ashr(builder.shl(x, eight), eight)),
        (builder.lshr(w, eight), builder.ashr(x, eight)),
    )
    for bytes_of_w, bytes_of_x in pairs:
        products = builder.mul(builder.sext(bytes_of_w, wide), builder.sext(bytes_of_x, wide))
        for first in (0, 1):
            lanes = ir.Constant(_INTS, list(range(first, 32, 2)))
            total = builder.add(total, builder.shuffle_vector(products, products, lanes))
    return total


@dataclass(frozen=True, slots=True)
class _Operands:
    """Addresses, and what lies at them."""

    lines: Any
    """[blocks, total_lines, 64] bytes: the integers of 4 (8 bits) or 8 (4 bits) inputs by 16 outputs, without a sign."""
    total_lines: Any
    group_lines: Any
    groups: Any
    digits: Any
    """[rows, digits, row_bytes] signed bytes, the most significant digit first."""
    row_bytes: Any
    offsets: Any
    """int32 [rows, groups, digits]: the sum of a digit over a group, negated."""
    scales: Any
    """[blocks, groups, 16] bfloat16 or float32."""
    zeros: Any
    """[blocks, groups, 16] uint8."""
    sums: Any
    """float32 [rows, blocks, 16]: what is written."""
    ahead: Any
    """What to fetch meanwhile, `ahead_stride` bytes further with every line."""
    ahead_stride: Any


class _Tile:
    """Emits one tile: `rows` x `blocks` vectors of sums for each of a row's `digits` bytes."""

    def __init__(
        self, rows: int, blocks: int, digits: int, bits: int, zeros: bool, bf16: bool, instruction: bool
    ) -> None:
        self._rows, self._blocks, self._digits, self._bits = range(rows), range(blocks), range(digits), bits
        self._has_zeros, self._bf16_scales = zeros, bf16
        self._add = _add_by_instruction if instruction else _add_by_arithmetic

    def emit(self, builder: Any, at: _Operands) -> None:
        """Sums of integers over a group, then its scale, group after group."""
        sums = {
            (r, d, b): cgutils.alloca_once(builder, _INTS)
            for r in self._rows
            for d in self._digits
            for b in self._blocks
        }
        totals = {(r, b): cgutils.alloca_once(builder, _FLOATS) for r in self._rows for b in self._blocks}
        for total in totals.values():
            builder.store(_constant(_FLOATS, 0.0), total)
        with cgutils.for_range(builder, at.groups) as group:
            self._start(builder, at, sums, group.index)
            first = builder.mul(group.index, at.group_lines)
            left = builder.sub(at.total_lines, first)
            is_last = builder.icmp_signed("<", left, at.group_lines)
            with cgutils.for_range(builder, builder.select(is_last, left, at.group_lines)) as line:
                self._line(builder, at, sums, builder.add(first, line.index))
            self._finish(builder, at, sums, totals, group.index)
        for (r, b), total in totals.items():
            place = builder.add(at.sums, _I64((r * len(self._blocks) + b) * _FLOAT_BYTES))
            builder.store(builder.load(total), builder.inttoptr(place, _FLOATS.as_pointer()), align=4)

    def _start(self, builder: Any, at: _Operands, sums: Any, group: Any) -> None:
        """Sums begin at zero point * -(the digit's sum over the group), since integers are stored without a sign."""
        for b in self._blocks:
            zero = self._zero_point(builder, at, builder.add(builder.mul(at.groups, _I64(b)), group))
            for r in self._rows:
                row = builder.add(builder.mul(at.groups, _I64(r)), group)
                for d in self._digits:
                    place = _offset(builder, at.offsets, row, 4 * len(self._digits), 4 * d)
                    offset = _splat(builder, _load(builder, place, _I32), _INTS)
                    builder.store(builder.mul(zero, offset), sums[r, d, b])

    def _zero_point(self, builder: Any, at: _Operands, row: Any) -> Any:
        if not self._has_zeros:
            return _constant(_INTS, 1 << self._bits - 1)
        stored = _load(builder, _offset(builder, at.zeros, row, LANES), ir.VectorType(_I8, LANES))
        return builder.zext(stored, _INTS)

    def _line(self, builder: Any, at: _Operands, sums: Any, line: Any) -> None:
        """64 bytes of every block, against the rows' four or eight bytes that meet them."""
        parts = [[self._load_line(builder, at, b, line)] for b in self._blocks]
        if self._bits == 4:
            parts = [
                [builder.and_(line, _constant(_BYTES, 15)), builder.lshr(line, _constant(_BYTES, 4))]
                for (line,) in parts
            ]
        quads = 8 // self._bits
        for quad in range(quads):
            place = _offset(builder, at.digits, line, 4 * quads, 4 * quad)
            for r in self._rows:
                for d in self._digits:
                    run = builder.mul(at.row_bytes, _I64(r * len(self._digits) + d))
                    row = _splat(builder, _load(builder, builder.add(place, run), _I32), _INTS)
                    for b in self._blocks:
                        total = builder.load(sums[r, d, b])
                        builder.store(self._add(builder, total, parts[b][quad], row), sums[r, d, b])
        ahead = builder.add(at.ahead, builder.mul(line, at.ahead_stride))
        builder.call(
            _prefetch(builder), [builder.inttoptr(ahead, _I8.as_pointer()), _I32(0), _I32(2), _I32(1)]
        )

    def _load_line(self, builder: Any, at: _Operands, block: int, line: Any) -> Any:
        row = builder.add(builder.mul(at.total_lines, _I64(block)), line)
        return _load(builder, _offset(builder, at.lines, row, 64), _BYTES)

    def _finish(self, builder: Any, at: _Operands, sums: Any, totals: Any, group: Any) -> None:
        """Digits to one float, most significant first, each step rounded once; then the group's scale."""
        fma = _function(builder, f"llvm.fma.v{LANES}f32", _FLOATS)
        for b in self._blocks:
            scale = self._scale(builder, at, builder.add(builder.mul(at.groups, _I64(b)), group))
            for r in self._rows:
                value = builder.sitofp(builder.load(sums[r, 0, b]), _FLOATS)
                for d in self._digits[1:]:
                    digit = builder.sitofp(builder.load(sums[r, d, b]), _FLOATS)
                    value = builder.call(fma, [value, _constant(_FLOATS, 256.0), digit])
                total = totals[r, b]
                builder.store(builder.call(fma, [value, scale, builder.load(total)]), total)

    def _scale(self, builder: Any, at: _Operands, row: Any) -> Any:
        if not self._bf16_scales:
            return _load(builder, _offset(builder, at.scales, row, _FLOAT_BYTES), _FLOATS)
        stored = _load(builder, _offset(builder, at.scales, row, _FLOAT_BYTES // 2), _HALVES)
        bits = builder.shl(builder.zext(stored, _INTS), _constant(_INTS, 16))
        return builder.bitcast(bits, _FLOATS)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_tile(
    typing_context: Any,
    rows: Any,
    blocks: Any,
    digits: Any,
    bits: Any,
    has_zeros: Any,
    bf16_scales: Any,
    by_instruction: Any,
    operands: Any,
) -> tuple[Signature, Callable[[Any, Any, Any, Any], Any]]:
    """sums[rows, blocks, 16] <- sum over groups of (integer sum * scale). `operands`: `_Operands` in its order, int64;
    everything else is a constant."""
    constants = (rows, blocks, digits, bits, has_zeros, bf16_scales, by_instruction)
    emitter = _Tile(*(constant.literal_value for constant in constants))

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emitter.emit(builder, _Operands(*cgutils.unpack_tuple(builder, arguments[-1])))
        return context.get_dummy_value()

    return types.void(*constants, operands), codegen
