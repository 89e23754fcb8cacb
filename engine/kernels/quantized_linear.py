"""y = x W^T + b with W stored in 8 or 4 bits: dequantized in registers on CUDA, by the reference elsewhere.

The CPU backend has its own layout and product, see `kernels.cpu.integer_linear`.
"""

from collections.abc import Hashable

import torch

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for, backend_on
from loraplex.engine.kernels.reference import quantized_linear as reference
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat


def quantized_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [rows, inputs] -> [rows, outputs] of x's dtype, in `out` if given; sums and bias [outputs] are rounded once.

    ValueError if shapes or dtypes do not fit.
    """
    out = _output(x, weight, out, bias)
    if x.shape[0] == 0:
        return out
    if backend_for(x) is KernelBackend.TRITON:
        _on_cuda(x.contiguous(), weight, out, bias)
    else:
        reference.quantized_linear(x, weight, out, bias)
    return out


def tiling(rows: int, weight: QuantizedWeight, dtype: torch.dtype) -> Hashable:
    """Return what the product of so many rows is compiled for: equal values mean the same machine code."""
    if backend_on(weight.packed.device) is not KernelBackend.TRITON or weight.format is WeightFormat.FP8:
        return None
    from loraplex.engine.kernels.triton.quantized_linear_tiles import splits_for, tile_for

    tile = tile_for(torch.empty(rows, 0, dtype=dtype), weight)
    return tile, splits_for(rows, weight, tile)


def _on_cuda(x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    from loraplex.engine.kernels import fp8_linear
    from loraplex.engine.kernels.triton import quantized_linear

    if weight.format is not WeightFormat.FP8:
        quantized_linear.quantized_linear(x, weight, out, bias)
    elif fp8_linear.serves(x, weight):
        fp8_linear.fp8_linear(x, weight, out, bias)
    else:
        reference.quantized_linear(x, weight, out, bias)


def _output(
    x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    rows, inputs = x.shape
    if inputs != weight.inputs:
        raise ValueError(f"x has {inputs} inputs, the weight {weight.inputs}")
    if bias is not None and (
        bias.shape != (weight.outputs,) or bias.dtype != x.dtype or not bias.is_contiguous()
    ):
        raise ValueError(f"bias must be contiguous {x.dtype} of shape [{weight.outputs}]")
    if out is None:
        return x.new_empty(rows, weight.outputs)
    if out.shape != (rows, weight.outputs) or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {x.dtype} of shape [{rows}, {weight.outputs}]")
    return out
