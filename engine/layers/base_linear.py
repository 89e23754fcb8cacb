"""`BaseLinear`: the interface of a base projection, and the one place that chooses its kind."""

from collections.abc import Hashable
from typing import Protocol

import torch

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for
from loraplex.engine.layers.dense_linear import Linear
from loraplex.engine.layers.quantized_linear import QuantizedLinear
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat, dequantize


class BaseLinear(Protocol):
    """y = x W^T + b. x [rows, inputs] -> [rows, outputs], a new tensor."""

    inputs: int
    outputs: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @property
    def layout(self) -> Hashable:
        """Equal for projections whose products are compiled alike at every number of rows."""
        ...

    def tiling(self, rows: int, dtype: torch.dtype) -> Hashable:
        """Equal for numbers of rows whose products run the same machine code; None where all do."""
        ...


def make_linear(
    weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> BaseLinear:
    """Return the layer that computes in `dtype`.

    float32 on a CPU asks for exactness: integers are dequantized there once, and no row is rounded.
    """
    if not isinstance(weight, QuantizedWeight):
        return _dense_linear(weight, bias)
    if weight.packed.device.type == "cpu" and dtype is torch.float32:
        return Linear(dequantize(weight), bias)
    if weight.format is not WeightFormat.FP8 and backend_for(weight.packed) is KernelBackend.COMPILED:
        # Imported here for the same reason as in `kernels/dispatch.py`.
        from loraplex.engine.layers.cpu_quantized_linear import IntegerLinear

        return IntegerLinear(weight, bias)
    return QuantizedLinear(weight, bias)


def _dense_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> BaseLinear:
    if weight.dtype is torch.bfloat16 and backend_for(weight) is KernelBackend.COMPILED:
        from loraplex.engine.layers.cpu_dense_linear import BFloat16Linear, is_faster_than_torch

        if is_faster_than_torch():
            return BFloat16Linear(weight, bias)
    return Linear(weight, bias)
