"""A linear layer whose weight stays in 8 or 4 bits."""

from collections.abc import Hashable

import torch

from loraplex.engine.kernels.quantized_linear import quantized_linear, tiling
from loraplex.engine.layers.base_linear import BaseLinear
from loraplex.engine.quantization.quantized_weight import QuantizedWeight


class QuantizedLinear(BaseLinear):
    """y = x W^T + b with W in integers and scales. A row's result does not depend on the other rows."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, self._weight, bias=self._bias)

    @property
    def layout(self) -> Hashable:
        weight = self._weight
        return weight.format, weight.shape, weight.group_size, weight.zeros is None, self._bias is None

    def tiling(self, rows: int, dtype: torch.dtype) -> Hashable:
        return tiling(rows, self._weight, dtype)
