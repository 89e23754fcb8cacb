"""y = x W^T + b in float8_e4m3fn by torch's row-wise scaled product (Micikevicius et al. 2022, FP8 Formats for Deep
Learning).

Invariant: a row is rounded by its own largest value, so that it does not depend on other rows.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.launch_plans import launch_kernel
from loraplex.engine.quantization.quantized_weight import LARGEST_FP8, QuantizedWeight, WeightFormat

MULTIPLE = 16
"""The product's inputs and outputs must be multiples of this."""
LONGEST_BLOCK = 16384
"""Most values of a row that one program holds at once."""
FAST_SUMS = False
"""Whether to sum in the tensor cores alone, with 14 bits: no gain, since a decode waits for memory either way."""


def serves(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Whether this product is supported: fp8, multiples of `MULTIPLE`, rows in 16 bits."""
    if weight.format is not WeightFormat.FP8 or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    return weight.inputs % MULTIPLE == 0 and weight.outputs % MULTIPLE == 0


@triton.jit  # type: ignore[untyped-decorator]
def round_rows_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, inputs]
    y,  # [rows, inputs], float8e4nv; a wider type takes the values before they are rounded
    scales,  # [rows]
    inputs,
    largest_value: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Round one row. NaN stays NaN and infinity becomes NaN: the row's result is not finite either way."""
    row = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, block)
    largest = tl.zeros((block,), dtype=tl.float32)
    for first in range(0, inputs, block):
        k = first + within
        value = tl.load(x + row * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    # A row of zeros, or of values too small to divide by, is rounded to zeros.
    most = tl.maximum(tl.max(largest, axis=0), 1e-30)
    tl.store(scales + row, most / largest_value)
    inverse = largest_value / most
    for first in range(0, inputs, block):
        k = first + within
        value = tl.load(x + row * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)
        tl.store(y + row * inputs + k, (value * inverse).to(y.dtype.element_ty), mask=k < inputs)


def round_rows(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, inputs] contiguous -> its values over their scale in `dtype`, and scales [rows, 1] float32."""
    rows, inputs = x.shape
    block = min(LONGEST_BLOCK, triton.next_power_of_2(inputs))
    y = torch.empty_like(x, dtype=dtype)
    scales = x.new_empty(rows, 1, dtype=torch.float32)
    launch_kernel(
        round_rows_kernel,
        (rows,),
        x,
        y,
        scales,
        inputs,
        largest_value=LARGEST_FP8,
        block=block,
        num_warps=max(1, min(16, block // 512)),
    )
    return y, scales


def multiply(
    rounded: torch.Tensor,
    row_scales: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """out = (rounded * row_scales) @ dequantized.T + bias, summed in fp32 and rounded once, or twice for float16."""
    is_direct = out.dtype is torch.bfloat16
    y = torch._scaled_mm(
        rounded,
        weight.packed.t(),
        scale_a=row_scales,
        scale_b=weight.scales.float(),
        bias=bias if is_direct or bias is None else bias.bfloat16(),
        out_dtype=torch.bfloat16,
        use_fast_accum=FAST_SUMS,
        out=out if is_direct else None,
    )
    if not is_direct:
        out.copy_(y)


def fp8_linear(
    x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """See `reference.quantized_linear`, for rows rounded to float8_e4m3fn. Call only if `serves` allows it. x contiguous."""
    rounded, row_scales = round_rows(x)
    multiply(rounded, row_scales, weight, out, bias)
