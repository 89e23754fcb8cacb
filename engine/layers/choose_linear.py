"""`make_linear`: the one place that chooses the kind of a base projection, by its weight, its type and its device."""

import torch

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for
from loraplex.engine.layers.base_linear import BaseLinear, FixedRowsLinear
from loraplex.engine.layers.dense_linear import Linear
from loraplex.engine.layers.quantized_linear import QuantizedLinear
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat, dequantize


def make_linear(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    deterministic: bool = False,
) -> BaseLinear:
    """Return the layer that computes in `dtype`; with `deterministic` its sums do not depend on the number of rows.

    float32 on a CPU asks for exactness: integers are dequantized there once, and no row is rounded.
    """
    linear = _linear(weight, bias, dtype)
    # The kernels of `kernels/cpu/` sum in one order at every number of rows.
    is_padded = deterministic and isinstance(linear, Linear | QuantizedLinear)
    return FixedRowsLinear(linear) if is_padded else linear


def _linear(
    weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> BaseLinear:
    if not isinstance(weight, QuantizedWeight):
        return _dense_linear(weight, bias)
    if weight.packed.device.type == "cpu" and dtype is torch.float32:
        return Linear(dequantize(weight), bias)
    if weight.format is not WeightFormat.FP8 and backend_for(weight.packed) is KernelBackend.COMPILED:
        # Imported here for the same reason as in `kernels/dispatch.py`.
        from loraplex.engine.layers.cpu_linear import IntegerLinear

        return IntegerLinear(weight, bias)
    return QuantizedLinear(weight, bias)


def _dense_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> BaseLinear:
    if weight.dtype is torch.bfloat16 and backend_for(weight) is KernelBackend.COMPILED:
        from loraplex.engine.layers.cpu_linear import BFloat16Linear, is_faster_than_torch

        if is_faster_than_torch():
            return BFloat16Linear(weight, bias)
    return Linear(weight, bias)
