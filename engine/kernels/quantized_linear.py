"""y = x W^T with W in 8 or 4 bits: dequantized in registers on CUDA, torch's packed products for bfloat16 on a CPU.

Other dtypes on a CPU, and fp8 everywhere, are the reference's: who computes in float32 asks for exactness.
"""

import torch

from loraplex.engine.kernels import cpu_quantized_linear as cpu
from loraplex.engine.kernels.reference import quantized_linear as reference
from loraplex.engine.quantization.weight import QuantizedWeight, WeightFormat


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [rows, inputs] contiguous -> [rows, outputs] of x's dtype, in `out` if given. ValueError if shapes do not fit."""
    rows, inputs = x.shape
    if inputs != weight.inputs:
        raise ValueError(f"x has {inputs} inputs, the weight {weight.inputs}")
    if out is None:
        out = x.new_empty(rows, weight.outputs)
    elif out.shape != (rows, weight.outputs) or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {x.dtype} of shape [{rows}, {weight.outputs}]")
    if rows == 0:
        return out
    if x.is_cuda and weight.format is not WeightFormat.FP8:
        from loraplex.engine.kernels import triton_quantized_linear

        triton_quantized_linear.quantized_linear(x.contiguous(), weight, out)
    elif cpu.serves(x, weight):
        cpu.quantized_linear(x.contiguous(), weight, out)
    else:
        reference.quantized_linear(x, weight, out)
    return out
