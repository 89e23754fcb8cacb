"""Converts bytes of quantized weights to floats in registers by placing integers in a mantissa: a conversion costs four
times that.

Invariant: exact, by assembly and by arithmetic alike.
"""

import triton
import triton.language as tl

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


@triton.jit  # type: ignore[untyped-decorator]
def raised_zero(zero, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert a zero point of 0..15 to what `nibbles_to_floats` subtracts: raised as a nibble is."""
    if dtype == tl.bfloat16:
        return (zero.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (zero.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        return zero.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def nibbles_to_floats(  # type: ignore[no-untyped-def]
    stored, low_zero, high_zero, has_zeros: tl.constexpr, dtype: tl.constexpr, assembly: tl.constexpr
):
    """Bytes to the integers of their low and of their high nibbles, exactly: each less its zero, or less 8 without zeros.

    A zero takes the place of the constant that lowers the raised nibble, so it costs no instruction per weight.
    """
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
        if not has_zeros:
            return low - 136.0, high - 136.0
    elif dtype == tl.float16:
        low = ((stored.to(tl.int16) & 15) | 0x6400).to(tl.float16, bitcast=True)
        high = ((stored.to(tl.int16) >> 4) | 0x6400).to(tl.float16, bitcast=True)
        if not has_zeros:
            return low - 1032.0, high - 1032.0
    else:
        low = (stored & 15).to(dtype)
        high = (stored >> 4).to(dtype)
        if not has_zeros:
            return low - 8.0, high - 8.0
    return low - low_zero, high - high_zero


@triton.jit  # type: ignore[untyped-decorator]
def byte_to_float(stored, dtype: tl.constexpr, assembly: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert an int8 exactly: placed in the mantissa of 2**23, since a converting instruction has a quarter of the rate."""
    if assembly:
        raised = tl.inline_asm_elementwise(
            _BYTES_ABOVE_2_23, "=&r,=&r,=&r,=&r,r", [stored], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        raised = (((stored.to(tl.int32) & 255) ^ 128) | 0x4B000000).to(tl.float32, bitcast=True)
    return (raised - 8388736.0).to(dtype)
