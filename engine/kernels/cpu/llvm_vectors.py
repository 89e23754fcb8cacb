"""Building blocks of LLVM code on vectors of 16 lanes, from which intrinsics are assembled.

Invariant: emitted code is defined for every input, NaN included, and gives the same result on every CPU, except that
instructions for bfloat16 count denormal numbers as zero.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding
from llvmlite import ir

LANES = 16


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()
BYTES, INTS, FLOATS = ir.VectorType(I8, 4 * LANES), ir.VectorType(I32, LANES), ir.VectorType(FLOAT, LANES)
PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)

_NEAREST = 12582912.0
"""1.5 * 2**23: adding it to a float of up to 2**22 rounds that to an integer, ties to even, in the sum's low bits."""


@cache
def has_byte_products() -> bool:
    """Whether this CPU multiplies and sums four bytes per lane in one instruction (AVX-512 VNNI)."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))


@cache
def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies and sums two bfloat16 per lane in one instruction (AVX-512 BF16)."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16"))


@cache
def has_matrix_products() -> bool:
    """Whether this CPU multiplies tiles of 16 rows of bfloat16 in one instruction (AMX)."""
    return bool(llvmlite.binding.get_host_cpu_features().get("amx-bf16"))


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    """`value` in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def splat(builder: Any, scalar: Any, count: int = LANES) -> Any:
    """A vector with `scalar` in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, constant(ir.VectorType(I32, count), 0))


def load(builder: Any, address: Any, kind: ir.Type, align: int) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, address: Any, value: Any, align: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


@contextmanager
def repeated(builder: Any, count: Any) -> Iterator[None]:
    """Code that runs `count` times, at least once."""
    before = builder.block
    body, after = builder.append_basic_block("repeated"), builder.append_basic_block("after")
    builder.branch(body)
    builder.position_at_end(body)
    left = builder.phi(I64)
    left.add_incoming(count, before)
    yield
    left_after = builder.sub(left, I64(1))
    left.add_incoming(left_after, builder.block)
    builder.cbranch(builder.icmp_signed(">", left_after, I64(0)), body, after)
    builder.position_at_end(after)


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the line at `address` into the second-level cache; the address may be invalid."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    function = _function(builder, "llvm.prefetch.p0", ir.VoidType(), (pointer.type, I32, I32, I32))
    builder.call(function, [pointer, I32(0), I32(2), I32(1)])


def fused_multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    function = _function(builder, f"llvm.fma.v{LANES}f32", FLOATS, (FLOATS, FLOATS, FLOATS))
    return builder.call(function, [x, y, z])


def reduce(builder: Any, operation: str, vector: Any) -> Any:
    """Reduce all lanes to one by LLVM's integer reduction `operation`."""
    name = f"llvm.vector.reduce.{operation}.v{vector.type.count}i{vector.type.element.width}"
    return builder.call(_function(builder, name, vector.type.element, (vector.type,)), [vector])


def nearest_integers(builder: Any, numbers: Any) -> Any:
    """Round floats of up to 2**22 to int32, ties to even; other numbers give an arbitrary integer."""
    moved = builder.bitcast(builder.fadd(numbers, constant(FLOATS, _NEAREST)), INTS)
    return builder.sub(moved, builder.bitcast(constant(FLOATS, _NEAREST), INTS))


def byte_products(builder: Any, sums: Any, unsigned: Any, signed: Any, by_instruction: bool) -> Any:
    """sums + the four products in each lane of `unsigned` bytes [64] and the four `signed` bytes of an int32."""
    if by_instruction:
        function = _function(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, (INTS, INTS, INTS))
        return builder.call(function, [sums, builder.bitcast(unsigned, INTS), splat(builder, signed)])
    lanes = builder.bitcast(unsigned, INTS)
    for shift in (0, 8, 16, 24):
        number = builder.ashr(builder.shl(signed, I32(24 - shift)), I32(24))
        byte = builder.and_(builder.lshr(lanes, constant(INTS, shift)), constant(INTS, 255))
        sums = builder.add(sums, builder.mul(byte, splat(builder, number)))
    return sums


def bfloat16_products(builder: Any, sums: Any, pairs: Any, factors: Any, by_instruction: bool) -> Any:
    """sums + the two products in each lane of int32 `pairs` and `factors`, each two bfloat16; the higher ones first."""
    if by_instruction:
        function = _function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, (FLOATS, PAIRS, PAIRS))
        return builder.call(function, [sums, builder.bitcast(pairs, PAIRS), builder.bitcast(factors, PAIRS)])
    for widened in (_high_bfloat16, _low_bfloat16):
        sums = fused_multiply_add(builder, widened(builder, pairs), widened(builder, factors), sums)
    return sums


def _low_bfloat16(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.shl(pairs, constant(INTS, 16)), FLOATS)


def _high_bfloat16(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.and_(pairs, constant(INTS, 0xFFFF0000)), FLOATS)


def widened_bfloat16(builder: Any, bits: Any) -> Any:
    """[16] int16 -> [16] float32."""
    return builder.bitcast(builder.shl(builder.zext(bits, INTS), constant(INTS, 16)), FLOATS)


def narrowed_bfloat16(builder: Any, numbers: Any) -> Any:
    """[16] float32 -> [16] int16, ties to even. A NaN stays NaN, since the carry could turn it into infinity."""
    bits = builder.bitcast(numbers, INTS)
    odd = builder.and_(builder.lshr(bits, constant(INTS, 16)), constant(INTS, 1))
    rounded = builder.add(builder.add(bits, constant(INTS, 0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    kept = builder.select(is_nan, constant(INTS, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, constant(INTS, 16)), ir.VectorType(I16, LANES))


def _function(builder: Any, name: str, result: ir.Type, arguments: tuple[ir.Type, ...]) -> Any:
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)
